"""Views of the host's address space: they copy nothing, and only the bytes used are touched."""

import ctypes
from collections import deque
from collections.abc import Iterable
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from restow.kernels.codes import Int64s

Voids = npt.NDArray[np.void]

RAW = (torch.uint8, torch.int16, torch.int32, torch.int64)
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = [*((raw, raw) for raw in RAW), (F32, BF16), (BF16, F32), (F32, F16), (F16, F32),
          (BF16, F16), (F16, BF16)]  # of source and destination, by code  # fmt: skip


def memmove_rows(src: Int64s, dst: Int64s, length_bytes: Int64s) -> None:
    """Call memmove once for every row."""
    _exhaust(map(ctypes.memmove, dst.tolist(), src.tolist(), length_bytes.tolist()))


def zero_rows(address: Int64s, length_bytes: Int64s) -> None:
    """Call memset once for every row."""
    _exhaust(map(ctypes.memset, address.tolist(), repeat(0), length_bytes.tolist()))


def view(
    address: int, sizes: tuple[int, ...], strides_bytes: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Return a box of elements in place."""
    reach = sum((size - 1) * step for size, step in zip(sizes, strides_bytes, strict=True))
    flat = torch.frombuffer(_buffer(address, reach + dtype.itemsize), dtype=dtype)
    return flat.as_strided(sizes, [step // dtype.itemsize for step in strides_bytes])


def void_windows(address: Int64s, length_bytes: int) -> tuple[Voids, Int64s]:
    """Return the run that begins at every byte, as one void each, and which ones the rows are."""
    first = int(address.min())
    count = int(address.max()) - first + 1
    buffer = _buffer(first, count + length_bytes - 1)
    return np.ndarray((count,), f"V{length_bytes}", buffer, strides=(1,)), address - first


def windows(
    address: Int64s, count: int, step_bytes: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row that begins at every element, [positions, count], and which ones are meant."""
    first = int(address.min())
    index = (address - first) // dtype.itemsize
    sizes = (int(index.max()) + 1, count)
    return view(first, sizes, (dtype.itemsize, step_bytes), dtype), torch.from_numpy(index)


def _buffer(address: int, length_bytes: int) -> Any:
    return (ctypes.c_char * length_bytes).from_address(address)


def _exhaust(calls: Iterable[object]) -> None:
    deque(calls, maxlen=0)
