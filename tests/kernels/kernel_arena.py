"""Poisoned memory, and a copy element by element that is too plain to be wrong."""

import ctypes
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from restow.kernels import Column, CopyCode, PieceTable

POISON = 0xA5
GUARD_BYTES = 64
DTYPES = {
    CopyCode.COPY_1: (torch.uint8, torch.uint8),
    CopyCode.COPY_2: (torch.int16, torch.int16),
    CopyCode.COPY_4: (torch.int32, torch.int32),
    CopyCode.COPY_8: (torch.int64, torch.int64),
    CopyCode.F32_BF16: (torch.float32, torch.bfloat16),
    CopyCode.BF16_F32: (torch.bfloat16, torch.float32),
    CopyCode.F32_F16: (torch.float32, torch.float16),
    CopyCode.F16_F32: (torch.float16, torch.float32),
    CopyCode.BF16_F16: (torch.bfloat16, torch.float16),
    CopyCode.F16_BF16: (torch.float16, torch.bfloat16),
}


Bytes = npt.NDArray[np.uint8]


class Arena:
    """Bytes between two guards; `address` is that of the first byte after the first guard."""

    def __init__(self, length_bytes: int, seed: int | None = None) -> None:
        self.memory = np.full(length_bytes + 2 * GUARD_BYTES + 8, POISON, dtype=np.uint8)
        skip = -self.memory.ctypes.data % 8  # so that the address is a multiple of 8
        self.memory = self.memory[skip : skip + length_bytes + 2 * GUARD_BYTES]
        self.address = self.memory.ctypes.data + GUARD_BYTES
        if seed is not None:
            self.bytes[:] = np.random.default_rng(seed).integers(0, 256, length_bytes)

    @property
    def bytes(self) -> Bytes:
        return self.memory[GUARD_BYTES:-GUARD_BYTES]

    def twin(self) -> "Arena":
        """An arena with the same bytes elsewhere."""
        other = Arena(len(self.bytes))
        other.memory[:] = self.memory
        return other


def moved(table: PieceTable, old: Arena, new: Arena) -> PieceTable:
    """The table with its destinations in `new` instead of `old`."""
    rows = table.rows.copy()
    rows[:, Column.DST_ADDRESS] += new.address - old.address
    return PieceTable.checked(rows)


def copy_elements(table: PieceTable) -> None:
    """The definition: one element after the other."""
    for src, dst, count, src_step, dst_step, code in table.rows.tolist():
        src_dtype, dst_dtype = DTYPES[CopyCode(code)]
        for i in range(count):
            raw = bytearray(ctypes.string_at(src + i * src_step, src_dtype.itemsize))
            value = torch.frombuffer(raw, dtype=src_dtype).to(dst_dtype)
            ctypes.memmove(dst + i * dst_step, value.data_ptr(), dst_dtype.itemsize)


def nan_as_one(table: PieceTable) -> None:
    """Give every NaN that a cast wrote the same bits: payloads are nobody's promise."""
    for _, dst, count, _, dst_step, code in table.rows.tolist():
        dtype = DTYPES[CopyCode(code)][1]
        if dtype.is_floating_point:
            for i in range(count):
                raw = (ctypes.c_char * dtype.itemsize).from_address(dst + i * dst_step)
                value = torch.frombuffer(raw, dtype=dtype)
                value[value.isnan()] = torch.nan


def assert_copies(
    copy_pieces: Callable[[PieceTable], None], table: PieceTable, target: Arena
) -> None:
    """Run a copy and the definition into two poisoned arenas; demand equal bytes, guards too."""
    want, got = target.twin(), target.twin()
    to_want, to_got = moved(table, target, want), moved(table, target, got)
    copy_elements(to_want)
    copy_pieces(to_got)
    nan_as_one(to_want)
    nan_as_one(to_got)
    wrong = np.flatnonzero(want.memory != got.memory) - GUARD_BYTES
    assert not len(wrong), f"{len(wrong)} bytes differ, the first at {wrong[0]}"
