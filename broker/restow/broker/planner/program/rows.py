"""Tables of rows: joined where they go on, and split where they are strided."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np

from restow.broker.errors import TooManyPiecesError
from restow.broker.layout.dtype import ITEM_BYTES, DType
from restow.broker.layout.rows import MAX_ROWS, Bools, Int64s
from restow.broker.planner.program.columns import Column


def no_rows(columns: type[IntEnum] = Column) -> Int64s:
    """A table without rows."""
    return np.zeros((0, len(columns)), np.int64)


def joined(
    rows: Int64s,
    same: Sequence[IntEnum],
    offsets: Sequence[IntEnum],
    count: IntEnum,
    steps: Sequence[IntEnum],
    apart: Bools | None = None,
) -> tuple[Int64s, Int64s]:
    """Join rows that are the ``same`` where each goes on as the one before ends.

    That is ``count`` steps behind where it begins. Those that stand ``apart`` are left. Returns the
    joined rows in the order of ``same``, then of the first offset, and for each given row the
    number of the one that it went into.
    """
    if len(rows) < 2:
        return rows, np.zeros(len(rows), np.int64)
    order = np.lexsort((rows[:, offsets[0]], *rows[:, same].T[::-1]))
    rows = rows[order]
    ends = rows[:, offsets] + rows[:, [count]] * rows[:, steps]
    continues = (rows[1:, same] == rows[:-1, same]).all(axis=1)
    continues &= (rows[1:, offsets] == ends[:-1]).all(axis=1)
    if apart is not None:
        continues &= ~apart[order][1:]
    begins = np.concatenate([[True], ~continues])
    first = np.flatnonzero(begins)
    made = rows[first]
    made[:, count] = np.add.reduceat(rows[:, count], first)
    row_of = np.empty(len(rows), np.int64)
    row_of[order] = np.cumsum(begins) - 1
    return made, row_of


def join_rows(rows: Int64s) -> tuple[Int64s, Int64s]:
    """Join rows of bytes that continue each other on both sides, across fields too.

    Returns the joined rows, those of one region together, and for each given row the number of the
    one that it went into.
    """
    return joined(rows, _SAME, _OFFSETS, Column.COUNT, _STEPS, apart=strided(rows))


def strided(rows: Int64s) -> Bools:
    """Mask of the rows that are not runs of bytes."""
    steps = rows[:, [Column.SRC_STEP_BYTES, Column.DST_STEP_BYTES]]
    dtypes = rows[:, [Column.SRC_DTYPE, Column.DST_DTYPE]]
    mask: Bools = (steps != 1).any(axis=1) | (dtypes != DType.UINT8).any(axis=1)
    return mask


def split_rows(rows: Int64s) -> Int64s:
    """Strided rows as one row an element, because a READ moves contiguous bytes.

    Raises `TooManyPiecesError`.
    """
    wide = strided(rows)
    if not wide.any():
        return rows
    table = rows[wide]
    counts = table[:, Column.COUNT]
    if int(counts.sum()) > MAX_ROWS:
        raise TooManyPiecesError(
            f"a rank would read more than {MAX_ROWS} single elements: use pack or auto"
        )
    single = np.repeat(table, counts, axis=0)
    index = np.arange(len(single)) - np.repeat(np.cumsum(counts) - counts, counts)
    single[:, Column.SRC_OFFSET_BYTES] += index * single[:, Column.SRC_STEP_BYTES]
    single[:, Column.DST_OFFSET_BYTES] += index * single[:, Column.DST_STEP_BYTES]
    single[:, Column.COUNT] = ITEM_BYTES[single[:, Column.SRC_DTYPE]]
    single[:, [Column.SRC_STEP_BYTES, Column.DST_STEP_BYTES]] = 1
    single[:, [Column.SRC_DTYPE, Column.DST_DTYPE]] = DType.UINT8
    return join_rows(np.concatenate([rows[~wide], single]))[0]


_SAME = (
    Column.SRC_RANK,
    Column.GROUP_PAIR,
    Column.SRC_REGION,
    Column.DST_REGION,
    Column.SRC_TOKEN_STRIDE_BYTES,
    Column.DST_TOKEN_STRIDE_BYTES,
    Column.SRC_STEP_BYTES,
    Column.DST_STEP_BYTES,
    Column.SRC_DTYPE,
    Column.DST_DTYPE,
)
_OFFSETS = (Column.DST_OFFSET_BYTES, Column.SRC_OFFSET_BYTES)
_STEPS = (Column.DST_STEP_BYTES, Column.SRC_STEP_BYTES)
