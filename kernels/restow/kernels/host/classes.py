"""Piece rows sorted into classes that one vectorised copy can serve (numpy only).

classes: rows int64 [n, 6] -> list of rows int64 [m, 6]; inside a class every column but the two
addresses is equal. The order of the rows inside a class is theirs in the table.
"""

import numpy as np

from restow.kernels.codes import Column, Int64s
from restow.kernels.even_runs import HEAD, even_gap, even_runs

MAX_CLASSES = 64
ROWS_PER_CLASS = 16  # a vectorised copy costs about as much as that many rows
ODD = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1, 0x61C88647)
ARENA_BITS = 44  # a view of one class must span less than 2**63 bytes, repeated rows included


def classes(rows: Int64s) -> list[Int64s]:
    """Group the rows; split them into powers of two first where hardly any two are alike.

    At most about 20 powers of two occur, so tables of all-different rows stay vectorised as well.
    """
    groups = alike(rows)
    if len(groups) > MAX_CLASSES and len(rows) < ROWS_PER_CLASS * len(groups):
        groups = alike(_powers_of_two(rows))
    return groups


def even_parts(address: Int64s) -> list[slice] | None:
    """Cut ascending, evenly spaced addresses into their runs; None where there are too many.

    There are too many if the first rows have too many.
    """
    if len(address) > HEAD:
        if np.count_nonzero(~even_runs(address[:HEAD])) * ROWS_PER_CLASS > HEAD:
            return None
        gap = even_gap(address)
        if gap is not None and gap >= 0:
            return [slice(0, len(address))]
    start = np.flatnonzero(~even_runs(address))
    if len(start) > 1 and len(start) * ROWS_PER_CLASS > len(address):
        return None
    stop = np.append(start[1:], len(address))
    if np.any((stop - start > 1) & (address[stop - 1] < address[start])):
        return None
    return [slice(a, b) for a, b in zip(start.tolist(), stop.tolist(), strict=True)]


def alike(rows: Int64s) -> list[Int64s]:
    """Group the rows."""
    if not len(rows):
        return []
    kind = [rows[:, column] for column in list(Column)[Column.COUNT :]]
    kind += [rows[:, 0] >> ARENA_BITS, rows[:, 1] >> ARENA_BITS]
    kind = [column for column in kind if np.any(column != column[0])]
    if not kind:
        return [rows]
    # Sort by a hash, cut where a column differs: a collision only makes one class more.
    total = sum(column * odd for column, odd in zip(kind, ODD, strict=False))
    order = np.argsort(total, kind="stable")
    differs = np.zeros(len(rows) - 1, dtype=np.bool_)
    for column in kind:
        differs |= np.diff(column[order]) != 0
    return [rows[index] for index in np.split(order, np.flatnonzero(differs) + 1)]


def _powers_of_two(rows: Int64s) -> Int64s:
    """Split every row by the binary digits of its count, largest first."""
    parts = []
    for bit in range(int(rows[:, Column.COUNT].max()).bit_length()):
        count = rows[:, Column.COUNT]
        part = rows[(count >> bit) & 1 == 1]
        before = part[:, Column.COUNT, None] >> (bit + 1) << (bit + 1)  # elements in larger parts
        part[:, :2] += before * part[:, Column.SRC_STEP_BYTES : Column.CODE]
        part[:, Column.COUNT] = 1 << bit
        parts.append(part)
    return np.concatenate(parts)
