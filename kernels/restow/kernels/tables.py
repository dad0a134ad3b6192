"""The tables that kernels execute, and how rows are cut into tiles of equal size (numpy only)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from restow.kernels.codes import (
    DST_BYTES,
    SRC_BYTES,
    Bools,
    CopyCode,
    Int64s,
    PieceColumn,
    TableError,
)


def tiles(count: Int64s, block: int) -> Int64s:
    """Return (row, first element) of every tile of `block` elements, as int64 [t, 2].

    >>> tiles(np.array([5, 0, 8, 1]), 4).tolist()
    [[0, 0], [0, 4], [2, 0], [2, 4], [3, 0]]
    """
    per_row = (count + block - 1) // block
    row = np.repeat(np.arange(len(count)), per_row)
    before = np.cumsum(per_row) - per_row  # tiles of the rows before
    return np.stack([row, (np.arange(len(row)) - before[row]) * block], axis=1).astype(np.int64)


def even_runs(*arrays: Int64s, same: Bools | None = None) -> Bools:
    """Mark the rows that continue the run of the row before them.

    Two rows join only if the step between them equals a neighbouring step, so the jump from one
    run to the next belongs to neither run. `same[i]` False forbids row i to join row i - 1.

    >>> even_runs(np.array([0, 2, 4, 100, 102, 104, 9]))
    array([False,  True,  True, False,  True,  True, False])
    """
    n = len(arrays[0])
    joined = np.zeros(n, dtype=np.bool_)
    if n < 3:
        return joined
    allowed = np.ones(n - 1, dtype=np.bool_) if same is None else same[1:]
    alike = np.zeros(n, dtype=np.bool_)  # alike[i]: step i equals step i - 1
    alike[1:-1] = allowed[1:] & allowed[:-1]
    for array in arrays:
        step = np.diff(array)
        alike[1:-1] &= step[1:] == step[:-1]
    linked = (alike[:-1] | alike[1:]) & allowed
    joined[1:] = linked
    joined[2:] &= ~linked[:-1] | alike[1:-1]  # two runs that meet in a row: the first keeps it
    return joined


SHORT_ROW_ELEMS = 32  # rows below it cost more in overhead than in bytes


def contiguous(rows: Int64s) -> Bools:
    """Mark the raw rows that are one run of bytes at the source and at the destination."""
    unit = SRC_BYTES[rows[:, PieceColumn.CODE]]
    dense = (rows[:, PieceColumn.SRC_STEP_BYTES] == unit) & (
        rows[:, PieceColumn.DST_STEP_BYTES] == unit
    )
    dense |= rows[:, PieceColumn.COUNT] <= 1
    raw = rows[:, PieceColumn.CODE] <= CopyCode.COPY_8
    both: Bools = dense & raw
    return both


def evenly_spaced(rows: Int64s, short: Bools) -> tuple[Int64s, Int64s, Int64s]:
    """Find runs of short rows of one shape that are evenly spaced on both sides.

    Returns the first row of each run (a row may be alone), its number of rows, and the gap between
    them at source and destination, [runs, 2].
    """
    same = np.append(False, short[1:])
    for column in list(PieceColumn)[PieceColumn.COUNT :]:
        same[1:] &= rows[1:, column] == rows[:-1, column]
    start = np.flatnonzero(~even_runs(rows[:, 0], rows[:, 1], same=same))
    gap = rows[np.minimum(start + 1, len(rows) - 1), :2] - rows[start, :2]
    return start, np.diff(np.append(start, len(rows))), gap


def lengthened(rows: Int64s) -> Int64s:
    """Rewrite every run of r short rows of c < r elements, evenly spaced on both sides.

    Each run is a box [r, c]. If its rows abut on both sides, it becomes one row of r * c
    elements. Otherwise it becomes c rows of r elements: the box is walked along its long axis.
    """
    count = rows[:, PieceColumn.COUNT]
    short = count < SHORT_ROW_ELEMS
    if not short.any():
        return rows
    start, length, gap = evenly_spaced(rows, short)
    long = (length > np.maximum(count[start], 2)) & np.all(gap > 0, axis=1)
    kept = rows[~np.repeat(long, length)]
    start, length, gap = start[long], length[long], gap[long]
    if not len(start):
        return rows

    count, step = (
        rows[start, PieceColumn.COUNT],
        rows[start, PieceColumn.SRC_STEP_BYTES : PieceColumn.CODE],
    )
    abut = np.all(gap == count[:, None] * step, axis=1)
    new_rows = np.where(abut, 1, count)  # by run
    run = np.repeat(np.arange(len(start)), new_rows)
    i_row = np.arange(len(run)) - np.repeat(np.cumsum(new_rows) - new_rows, new_rows)
    box = rows[start[run]]
    box[:, :2] += i_row[:, None] * step[run]
    box[:, PieceColumn.COUNT] = np.where(abut, length * count, length)[run]
    box[:, PieceColumn.SRC_STEP_BYTES : PieceColumn.CODE] = np.where(abut[:, None], step, gap)[run]
    return np.concatenate([kept, box])


class PieceTableError(TableError):
    """A piece table breaks a rule."""

    table = "piece table"


@dataclass(frozen=True, slots=True, eq=False)
class PieceTable:
    """The rows of a piece table that passed the checks of `PieceTable.checked`."""

    rows: Int64s  # [n, 6]

    @classmethod
    def checked(cls, rows: npt.NDArray[Any]) -> PieceTable:
        """Check every row and return the table; raise `PieceTableError` if a row breaks a rule.

        Addresses and steps must be multiples of the element's size, because a GPU requires it. A
        contiguous run at any address may be given as COPY_1 of its bytes.
        The checks go column by column, so a table that is stored by column is checked faster.
        """
        PieceTableError.check_shape(rows, PieceColumn)
        count, code = rows[:, PieceColumn.COUNT], rows[:, PieceColumn.CODE]
        if _is_obviously_valid(rows):
            return cls(rows)
        refuse = partial(PieceTableError.refuse, rows)
        refuse((code < 0) | (code >= len(CopyCode)), PieceColumn.CODE, "is no known code")
        refuse(count < 0, PieceColumn.COUNT, "is negative")
        for address, step, low_bits in (
            (PieceColumn.SRC_ADDRESS, PieceColumn.SRC_STEP_BYTES, SRC_BYTES[code] - 1),
            (PieceColumn.DST_ADDRESS, PieceColumn.DST_STEP_BYTES, DST_BYTES[code] - 1),
        ):
            uneven = "is no multiple of the element's size"
            refuse((count > 0) & (rows[:, address] <= 0), address, "is no address")
            refuse((count > 0) & (rows[:, address] & low_bits != 0), address, uneven)
            refuse((count > 1) & (rows[:, step] <= 0), step, "is not positive")
            refuse((count > 1) & (rows[:, step] & low_bits != 0), step, uneven)
        return cls(rows)

    @property
    def bytes_written(self) -> int:
        """Bytes that all rows write."""
        return int(
            (self.rows[:, PieceColumn.COUNT] * DST_BYTES[self.rows[:, PieceColumn.CODE]]).sum()
        )

    def lengthen(self) -> PieceTable:
        """Regroup runs of short, evenly spaced rows into few long rows of the same elements."""
        return PieceTable(lengthened(self.rows))


def _is_obviously_valid(rows: Int64s) -> bool:
    """Return True if a cheap check proves every row valid; False proves nothing."""
    if not len(rows) or rows.min() < 0 or rows[:, : PieceColumn.CODE].min() == 0:
        return False
    code = rows[:, PieceColumn.CODE]
    if code[0] >= len(CopyCode) or np.any(code != code[0]):
        return False
    src, dst, _, src_step, dst_step = np.bitwise_or.reduce(rows[:, : PieceColumn.CODE], axis=0)
    low_bits = (int(sizes[code[0]]) - 1 for sizes in (SRC_BYTES, DST_BYTES))
    return not any(
        (end & low) for end, low in zip((src | src_step, dst | dst_step), low_bits, strict=True)
    )


TILE_UNITS = 2048


class SlotColumn(IntEnum):
    """Columns of a slot table."""

    BASE_ADDRESS = 0
    PAGE_STRIDE_BYTES = 1
    OFFSET_BYTES = 2
    LENGTH_BYTES = 3
    GROUP = 4


class SlotTableError(TableError):
    """A slot table breaks a rule."""

    table = "slot table"


@dataclass(frozen=True, slots=True, eq=False)
class SlotTable:
    """The ranges of a slot table that passed the checks of `SlotTable.checked`."""

    rows: torch.Tensor  # [n, 5]
    tiles: torch.Tensor  # [t, 2]
    unit_bytes: int  # 1, 2, 4 or 8: divides every address and length
    groups: int  # page id lists that the rows use

    @classmethod
    def checked(cls, rows: npt.NDArray[Any], device: torch.device | str = "cpu") -> SlotTable:
        """Check every row and move the table to the device, once for many launches."""
        SlotTableError.check_shape(rows, SlotColumn)
        for column in SlotColumn:
            bad = rows[:, column] < (1 if column == SlotColumn.BASE_ADDRESS else 0)
            if bad.any():
                row = int(np.argmax(bad))
                raise SlotTableError(row, f"{column.name} is {rows[row, column]}")
        outside = rows[:, SlotColumn.OFFSET_BYTES] + rows[:, SlotColumn.LENGTH_BYTES]
        too_long = outside > rows[:, SlotColumn.PAGE_STRIDE_BYTES]
        if too_long.any():
            row = int(np.argmax(too_long))
            raise SlotTableError(row, f"the range ends at byte {outside[row]}, after its page ends")
        unit_bytes = int(np.gcd.reduce(rows[:, : SlotColumn.GROUP], axis=None, initial=8))
        units = rows[:, SlotColumn.LENGTH_BYTES] // unit_bytes
        return cls(
            torch.from_numpy(rows.copy()).to(device),
            torch.from_numpy(tiles(units, TILE_UNITS)).to(device),
            unit_bytes,
            int(rows[:, SlotColumn.GROUP].max(initial=0)) + 1,
        )

    def lists(self, slots: torch.Tensor) -> torch.Tensor:
        """Return page ids as [groups, s]; ``slots`` may be [s] if there is one group."""
        lists = slots.unsqueeze(0) if slots.ndim == 1 else slots
        if lists.ndim != 2 or len(lists) < self.groups:
            raise SlotTableError(
                None, f"{self.groups} groups need page lists, got {list(slots.shape)}"
            )
        return lists.contiguous()


class ProjectColumn(IntEnum):
    """Columns of a project table."""

    SRC_ADDRESS = 0
    SRC_TAP_STRIDE_BYTES = 1
    TAPS = 2
    HIDDEN = 3
    WEIGHT_ADDRESS = 4
    WEIGHT_STRIDE_BYTES = 5
    CHANNELS = 6
    DST_ADDRESS = 7
    DST_STRIDE_BYTES = 8
    DST_TAP_STRIDE_BYTES = 9
    TYPE = 10
    DST_TYPE = 11


class FloatCode(IntEnum):
    """Types that inputs and weights may have, and in which products are stored."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2


FLOAT_BYTES: Int64s = np.array([4, 2, 2], dtype=np.int64)  # by code


class ProjectTableError(TableError):
    """A project table breaks a rule."""

    table = "project table"


@dataclass(frozen=True, slots=True, eq=False)
class ProjectTable:
    """The rows of a project table that passed the checks of `ProjectTable.checked`."""

    rows: Int64s  # [n, 12]

    @classmethod
    def checked(cls, rows: npt.NDArray[Any]) -> ProjectTable:
        """Check every row and return the table; raise `ProjectTableError` if a row breaks a rule.

        Addresses and strides must be multiples of the element's size.
        """
        ProjectTableError.check_shape(rows, ProjectColumn)
        refuse = partial(ProjectTableError.refuse, rows)
        for column in (ProjectColumn.TYPE, ProjectColumn.DST_TYPE):
            code = rows[:, column]
            refuse((code < 0) | (code >= len(FloatCode)), column, "is no known type")
        item = FLOAT_BYTES[rows[:, ProjectColumn.TYPE]]
        dst_item = FLOAT_BYTES[rows[:, ProjectColumn.DST_TYPE]]
        for column in (ProjectColumn.TAPS, ProjectColumn.HIDDEN, ProjectColumn.CHANNELS):
            refuse(rows[:, column] < 1, column, "is not positive")
        for column, unit in (
            (ProjectColumn.SRC_ADDRESS, item),
            (ProjectColumn.WEIGHT_ADDRESS, item),
            (ProjectColumn.DST_ADDRESS, dst_item),
        ):
            refuse(rows[:, column] <= 0, column, "is no address")
            refuse(rows[:, column] % unit != 0, column, _UNEVEN)
        for column, count, unit in (
            (ProjectColumn.SRC_TAP_STRIDE_BYTES, ProjectColumn.TAPS, item),
            (ProjectColumn.WEIGHT_STRIDE_BYTES, ProjectColumn.CHANNELS, item),
            (ProjectColumn.DST_STRIDE_BYTES, ProjectColumn.CHANNELS, dst_item),
            (ProjectColumn.DST_TAP_STRIDE_BYTES, ProjectColumn.TAPS, dst_item),
        ):
            used = rows[:, count] > 1
            refuse(used & (rows[:, column] <= 0), column, "is not positive")
            refuse(used & (rows[:, column] % unit != 0), column, _UNEVEN)
        return cls(np.ascontiguousarray(rows))


_UNEVEN = "is no multiple of the element's size"
