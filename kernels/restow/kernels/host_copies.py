"""Copies on host memory, through views that touch only the bytes used."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from restow.kernels.codes import SRC_BYTES, Bools, Int64s, PieceColumn
from restow.kernels.tables import PieceTable, SlotTable, contiguous

Voids = npt.NDArray[np.void]

RAW = (torch.uint8, torch.int16, torch.int32, torch.int64)
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = [*((raw, raw) for raw in RAW), (F32, BF16), (BF16, F32), (F32, F16), (F16, F32),
          (BF16, F16), (F16, BF16)]  # of source and destination, by code  # fmt: skip


def memmove_rows(src: Int64s, dst: Int64s, length_bytes: Int64s) -> None:
    """Call memmove for every row."""
    _exhaust(map(ctypes.memmove, dst.tolist(), src.tolist(), length_bytes.tolist()))


def zero_rows(address: Int64s, length_bytes: Int64s) -> None:
    """Call memset for every row."""
    _exhaust(map(ctypes.memset, address.tolist(), repeat(0), length_bytes.tolist()))


def view(
    address: int, sizes: tuple[int, ...], strides_bytes: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Return a view of a box of elements."""
    reach = sum((size - 1) * step for size, step in zip(sizes, strides_bytes, strict=True))
    flat = torch.frombuffer(_buffer(address, reach + dtype.itemsize), dtype=dtype)
    return flat.as_strided(sizes, [step // dtype.itemsize for step in strides_bytes])


def void_windows(address: Int64s, length_bytes: int) -> tuple[Voids, Int64s]:
    """Return void views of `length_bytes` at every byte position, and the position of each row."""
    first = int(address.min())
    count = int(address.max()) - first + 1
    buffer = _buffer(first, count + length_bytes - 1)
    return np.ndarray((count,), f"V{length_bytes}", buffer, strides=(1,)), address - first


def windows(
    address: Int64s, count: int, step_bytes: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of a row at every element, [positions, count], and the position of each row."""
    first = int(address.min())
    index = (address - first) // dtype.itemsize
    sizes = (int(index.max()) + 1, count)
    return view(first, sizes, (dtype.itemsize, step_bytes), dtype), torch.from_numpy(index)


def _buffer(address: int, length_bytes: int) -> Any:
    return (ctypes.c_char * length_bytes).from_address(address)


def _exhaust(calls: Iterable[object]) -> None:
    deque(calls, maxlen=0)


FEW_ROWS = 192
"""Up to this many rows, a memmove or copy for each row costs less than indexing a view."""
LONG_BYTES = 32 * 1024
"""From this length on, a memmove for each run is faster than a copy through a temporary.

Longer rows would also need views larger than an array can be.
"""
ROWS_PER_PART = 64
"""Rows that must share a view: setting up a view costs as much as indexing this many rows."""
CHUNK_BYTES = 256 * 1024
"""Size of a temporary, small enough to stay in the L2 cache."""
CHUNK_ELEMS = 16 * 1024
"""Elements in one torch operation; torch may use several threads for larger operations."""


def copy_pieces(table: PieceTable) -> None:
    """Execute the table's rows on host memory."""
    rows = table.lengthen().rows
    dense, nonempty = contiguous(rows), rows[:, PieceColumn.COUNT] > 0
    src, dst, count, _, _, code = _columns(rows, dense & nonempty)
    _copy_runs(src, dst, count * SRC_BYTES[code])
    strided = _columns(rows, ~dense & nonempty).T
    for same in _groups_of_equal(strided[:, PieceColumn.COUNT :]):
        _copy_strided(strided[same])


def _columns(rows: Int64s, mask: Bools) -> Int64s:
    """Return columns [6, n] of the masked rows: tables are mostly stored by column."""
    return rows.T if mask.all() else rows.T[:, mask]


def _copy_runs(src: Int64s, dst: Int64s, length_bytes: Int64s) -> None:
    """Copy runs of bytes; many short runs of the same length are copied together."""
    one_group = len(src) <= FEW_ROWS or length_bytes.min() == length_bytes.max()
    for same in [slice(None)] if one_group else _groups_of_equal(length_bytes[:, None]):
        length = length_bytes[same]
        if len(length) <= FEW_ROWS or length[0] >= LONG_BYTES:
            memmove_rows(src[same], dst[same], length)
        else:
            _copy_equal_runs(src[same], dst[same], int(length[0]))


def _copy_equal_runs(src: Int64s, dst: Int64s, length_bytes: int) -> None:
    """Copy many runs of equal length, which are mostly adjacent on the staging side."""
    gathered, scattered = _dense_parts(dst, length_bytes), _dense_parts(src, length_bytes)
    if gathered:
        for part in gathered:
            source, index = windows(src[part], length_bytes, 1, torch.uint8)
            shape, strides = (len(index), length_bytes), (length_bytes, 1)
            target = view(int(dst[part.start]), shape, strides, torch.uint8)
            torch.index_select(source, 0, index, out=target)
        return
    # Void elements let numpy make one memcpy for each run.
    (targets, dst_index), (sources, src_index) = (
        void_windows(address, length_bytes) for address in (dst, src)
    )
    for part in scattered:
        first = int(src_index[part.start])
        targets[dst_index[part]] = sources[first::length_bytes][: part.stop - part.start]
    for part in [] if scattered else _chunks(len(src), CHUNK_BYTES // length_bytes):
        targets[dst_index[part]] = sources[src_index[part]]


def _dense_parts(address: Int64s, length_bytes: int) -> list[slice]:
    """Return slices of adjacent rows, or nothing if hardly any rows are adjacent."""
    cuts = np.flatnonzero(np.diff(address) != length_bytes) + 1
    if len(cuts) * ROWS_PER_PART > len(address):
        return []
    return list(map(slice, [0, *cuts.tolist()], [*cuts.tolist(), len(address)]))


def _groups_of_equal(kind: Int64s) -> list[Int64s]:
    """Group equal rows of ``kind`` [n, ...]; return the row indices of each group."""
    if not len(kind):
        return []
    order = np.lexsort(kind.T)
    differs = (np.diff(kind[order], axis=0) != 0).any(axis=1)
    return np.split(order, np.flatnonzero(differs) + 1)


def _copy_strided(rows: Int64s) -> None:
    """Copy and cast rows of equal shape: row by row, or by chunks through an index."""
    src, dst = rows[:, PieceColumn.SRC_ADDRESS], rows[:, PieceColumn.DST_ADDRESS]
    count, src_step, dst_step, code = rows[0, PieceColumn.COUNT :].tolist()
    src_dtype, dst_dtype = DTYPES[code]
    if len(rows) <= FEW_ROWS or count >= CHUNK_ELEMS:
        for source, target in zip(src.tolist(), dst.tolist(), strict=True):
            values = view(source, (count,), (src_step,), src_dtype)
            _store(view(target, (count,), (dst_step,), dst_dtype), values)
        return
    sources, src_index = windows(src, count, src_step, src_dtype)
    targets, dst_index = windows(dst, count, dst_step, dst_dtype)
    for chunk in _chunks(len(rows), CHUNK_ELEMS // count):
        targets.index_put_(
            (dst_index[chunk],), sources.index_select(0, src_index[chunk]).to(dst_dtype)
        )


def _store(target: torch.Tensor, values: torch.Tensor) -> None:
    if target.dtype == values.dtype:
        np.copyto(target.numpy(), values.numpy())  # half of torch's overhead
    else:
        target.copy_(values)


def _chunks(rows: int, size: int) -> Iterator[slice]:
    for first in range(0, rows, size):
        yield slice(first, first + size)


def clear_slots(
    regions: SlotTable, slots: torch.Tensor, mask: torch.Tensor, of_zero: bool, first_page: int
) -> None:
    """Zero every listed byte range in the pages of host memory that the mask selects."""
    base, page_stride, offset, length, group = regions.rows.numpy()[:, :, None].transpose(1, 0, 2)
    marked = mask == 0 if of_zero else mask != 0
    page = regions.lists(slots)[:, marked].to(torch.int64).numpy()[group[:, 0]]  # [ranges, pages]
    start = base + offset + page * page_stride
    cleared = page >= first_page
    zero_rows(start[cleared], np.broadcast_to(length, start.shape)[cleared])
