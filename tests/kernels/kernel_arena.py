"""Poisoned memory, in which a copy and its reference must leave the same bytes."""

import ctypes
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from restow.kernels import CopyCode, PieceColumn, PieceTable, reference

POISON = 0xA5
GUARD_BYTES = 64

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
        """Return an arena with the same bytes elsewhere."""
        other = Arena(len(self.bytes))
        other.memory[:] = self.memory
        return other


def moved(table: PieceTable, old: Arena, new: Arena) -> PieceTable:
    """Return the table with its destinations in `new` instead of `old`."""
    rows = table.rows.copy()
    rows[:, PieceColumn.DST_ADDRESS] += new.address - old.address
    return PieceTable.checked(rows)


def nan_as_one(table: PieceTable) -> None:
    """Give every NaN that a cast wrote the same bits, as no definition promises payloads."""
    for _, dst, count, _, dst_step, code in table.rows.tolist():
        dtype = reference.COPIED[CopyCode(code)][1]
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
    reference.copy_pieces(to_want)
    copy_pieces(to_got)
    nan_as_one(to_want)
    nan_as_one(to_got)
    wrong = np.flatnonzero(want.memory != got.memory) - GUARD_BYTES
    assert not len(wrong), f"{len(wrong)} bytes differ, the first at {wrong[0]}"
