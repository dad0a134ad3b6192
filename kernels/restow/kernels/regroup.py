"""Piece rows rewritten into fewer rows that copy the same bytes (numpy only).

lengthened: rows int64 [n, 6] -> rows int64 [m, 6]; no Python loop over rows.
"""

import numpy as np

from restow.kernels.codes import SRC_BYTES, Bools, CopyCode, Int64s, PieceColumn
from restow.kernels.even_runs import even_runs

SHORT_ROW_ELEMS = 32  # rows below it cost more in overhead than in bytes


def contiguous(rows: Int64s) -> Bools:
    """Mark the raw rows that are one run of bytes on both sides."""
    unit = SRC_BYTES[rows[:, PieceColumn.CODE]]
    dense = (rows[:, PieceColumn.SRC_STEP_BYTES] == unit) & (
        rows[:, PieceColumn.DST_STEP_BYTES] == unit
    )
    dense |= rows[:, PieceColumn.COUNT] <= 1
    raw = rows[:, PieceColumn.CODE] <= CopyCode.COPY_8
    both: Bools = dense & raw
    return both


def lengthened(rows: Int64s) -> Int64s:
    """Rewrite every run of r short rows of c < r elements, evenly spaced on both sides.

    Such a run is a box [r, c]. Where its rows abut on both sides it is one row of r * c elements,
    else c rows of r elements: the box walked along its long axis.
    """
    count = rows[:, PieceColumn.COUNT]
    short = count < SHORT_ROW_ELEMS
    if not short.any():
        return rows
    same = np.append(False, short[1:])
    for column in list(PieceColumn)[PieceColumn.COUNT :]:
        same[1:] &= rows[1:, column] == rows[:-1, column]
    joined = even_runs(
        rows[:, PieceColumn.SRC_ADDRESS], rows[:, PieceColumn.DST_ADDRESS], same=same
    )
    if not joined.any():
        return rows
    start = np.flatnonzero(~joined)
    length = np.diff(np.append(start, len(rows)))
    gap = rows[np.minimum(start + 1, len(rows) - 1), :2] - rows[start, :2]  # [runs, src and dst]
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
