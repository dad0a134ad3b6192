"""Poisoned memory, in which a copy and its reference must leave the same bytes; random tables."""

import ctypes
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import strategies as st

from restow.kernels import (
    CopyCode,
    PieceColumn,
    PieceTable,
    RowCall,
    RowColumn,
    RowTable,
    SidePages,
    TokenList,
    reference,
)
from restow.kernels.codes import DST_BYTES, SRC_BYTES

POISON = 0xA5
GUARD_BYTES = 64

Bytes = npt.NDArray[np.uint8]

interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="a GPU is present: test_cuda.py runs the kernels on it"
)


def both(twin: Callable[..., None], triton: Callable[..., None]) -> pytest.MarkDecorator:
    """Run a test with the code for hosts, and with the kernel in Triton's interpreter."""
    kernel = pytest.param(triton, id="triton", marks=interpreted)
    return pytest.mark.parametrize("run", [pytest.param(twin, id="twin"), kernel])


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


def rows_of_pieces(table: PieceTable) -> tuple[RowTable, RowCall]:
    """Return a row for each piece that has elements, and the call that copies each once."""
    pieces = table.rows[table.rows[:, PieceColumn.COUNT] > 0]
    rows = np.zeros((len(pieces), len(RowColumn)), np.int64)
    for column, of_piece in (
        (RowColumn.SRC_ADDRESS, PieceColumn.SRC_ADDRESS),
        (RowColumn.SRC_STEP_BYTES, PieceColumn.SRC_STEP_BYTES),
        (RowColumn.DST_ADDRESS, PieceColumn.DST_ADDRESS),
        (RowColumn.DST_STEP_BYTES, PieceColumn.DST_STEP_BYTES),
        (RowColumn.COUNT, PieceColumn.COUNT),
        (RowColumn.CODE, PieceColumn.CODE),
    ):
        rows[:, column] = pieces[:, of_piece]
    made = RowTable.checked(rows)
    return made, RowCall.of(made, [TokenList(1, SidePages(), SidePages())], None)


SOURCE = Arena(1 << 16, seed=1)


@st.composite
def tables(draw: st.DrawFn, max_rows: int = 40, max_count: int = 70) -> tuple[PieceTable, Arena]:
    """Draw rows, lay their destinations out without overlap, and shuffle them.

    Rows come in groups of equal shape, as real tables do; a group may be evenly spaced at the
    source, and its destinations interleave or follow one another.
    """
    rows: list[tuple[int, ...]] = []
    end = 0
    while len(rows) < max_rows and draw(st.booleans() if rows else st.just(True)):
        code = draw(st.sampled_from(CopyCode))
        src_unit, dst_unit = int(SRC_BYTES[code]), int(DST_BYTES[code])
        n = draw(st.integers(1, max_rows - len(rows)))
        count = draw(st.sampled_from((0, 1, 2, 3, 5, 8, 32, 63, max_count, 128)))
        src_step = src_unit * draw(st.sampled_from((1, 1, 2, 3, 17)))
        dst_step = dst_unit * draw(st.sampled_from((1, 1, 2, 3)))
        span = max(count - 1, 0) * src_step + src_unit
        room = (len(SOURCE.bytes) - span) // 8 * 8
        if draw(st.booleans()):  # evenly spaced
            gap = draw(st.integers(0, room // n // src_unit)) * src_unit
            src = draw(st.integers(0, (room - n * gap) // 8)) * 8 + np.arange(n) * gap
        else:
            seed = draw(st.integers(0, 9))
            src = np.random.default_rng(seed).integers(0, room // src_unit, n) * src_unit
        if draw(st.booleans()) and n * dst_unit <= dst_step * 3:  # interleaved: row i + 1 in a gap
            dst_step = max(dst_step, n * dst_unit)
            dst = end + np.arange(n) * dst_unit
            end += max(count, 1) * dst_step + n * dst_unit
        else:
            gap = max(count - 1, 0) * dst_step + dst_unit
            gap += draw(st.sampled_from((0, 0, 1, 5))) * dst_unit
            dst = end + np.arange(n) * gap
            end += n * gap
        end += -end % 8 + draw(st.sampled_from((0, 8)))
        rows += [
            (SOURCE.address + int(a), int(b), count, src_step, dst_step, int(code))
            for a, b in zip(src, dst, strict=True)
        ]
    order = draw(st.sampled_from(("as is", "reversed", "shuffled")))
    if order == "reversed":
        rows.reverse()
    elif order == "shuffled":
        draw(st.randoms(use_true_random=False)).shuffle(rows)
    target = Arena(end)
    table = np.array(rows, dtype=np.int64)
    table[:, 1] += target.address
    return PieceTable.checked(table), target
