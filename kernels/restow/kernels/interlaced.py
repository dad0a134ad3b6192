"""Rows whose elements alternate in memory: k rows with k elements' steps fill one run.

A transposed copy looks so on one of its sides: the K-1 taps of a conv window, channel by channel.
The runs move as voids; only a temporary in cache is walked with a stride.
"""

from dataclasses import dataclass

import numpy as np
import torch

from restow.kernels.classes import alike_indices
from restow.kernels.codes import DST_BYTES, SRC_BYTES, Column, Int64s
from restow.kernels.host_memory import DTYPES, Rows
from restow.kernels.regroup import SHORT_ROW_ELEMS

CHUNK_ELEMS = 16 * 1024
"""In one operation of torch: with more it may fork."""
TURN_CHUNK_ELEMS = 64 * 1024
"""In one operation of numpy, which never forks; two such temporaries stay in L2."""


@dataclass(frozen=True, slots=True, eq=False)
class Interlaced:
    """Rows of equal shape in a table, ``index`` [runs, ways]: those of a run alternate on ``side``.

    ``unit_bytes`` is the size of an element there.
    """

    index: Int64s
    count: int
    code: int
    side: Column
    unit_bytes: int

    @classmethod
    def of(cls, rows: Int64s, index: Int64s) -> "Interlaced | None":
        """The rows [index] of a table, which are of equal shape; None if they do not alternate."""
        count, src_step, dst_step, code = rows[index[0], Column.COUNT :].tolist()
        src_bytes, dst_bytes = int(SRC_BYTES[code]), int(DST_BYTES[code])
        if src_step == src_bytes:
            ways, side, unit_bytes = dst_step // dst_bytes, Column.DST_ADDRESS, dst_bytes
        elif dst_step == dst_bytes:
            ways, side, unit_bytes = src_step // src_bytes, Column.SRC_ADDRESS, src_bytes
        else:
            return None
        if ways < 2 or len(index) % ways:
            return None
        order = np.argsort(rows[index, side], kind="stable")
        made = cls(index[order].reshape(-1, ways), count, code, side, unit_bytes)
        return made if made.holds(rows) else None

    def holds(self, rows: Int64s) -> bool:
        """Tell whether the same rows of a table alternate in the same order."""
        address = rows[:, self.side][self.index]
        return not np.any(address[:, 1:] - address[:, :-1] != self.unit_bytes)

    def copy(self, rows: Int64s) -> None:
        """Copy these rows of a table for which it `holds`."""
        runs, ways = self.index.shape
        src_dtype, dst_dtype = DTYPES[self.code]
        src, dst = rows[:, Column.SRC_ADDRESS][self.index], rows[:, Column.DST_ADDRESS][self.index]
        apart = self.side is Column.DST_ADDRESS
        if apart:
            source = Rows(src.ravel(), self.count, src_dtype.itemsize, src_dtype)
            target = Rows(dst[:, 0], self.count * ways, dst_dtype.itemsize, dst_dtype)
        else:
            source = Rows(src[:, 0], self.count * ways, src_dtype.itemsize, src_dtype)
            target = Rows(dst.ravel(), self.count, dst_dtype.itemsize, dst_dtype)
        chunk = TURN_CHUNK_ELEMS if src_dtype == dst_dtype else CHUNK_ELEMS
        step = max(1, chunk // self.count)
        for first in range(0, runs, step):
            n = min(step, runs - first)
            taken = source.read(_rows_of(first, n, source.n // runs))
            if apart:
                values = torch.empty((n, self.count, ways), dtype=dst_dtype)
                put, taken = values.transpose(1, 2), taken.view(n, ways, self.count)
            else:
                put = values = torch.empty((n, ways, self.count), dtype=dst_dtype)
                taken = taken.view(n, self.count, ways).transpose(1, 2)
            _turn(put, taken)
            whole = values.view(-1, target.count)
            target.write(_rows_of(first, n, target.n // runs), whole)


def all_interlaced(rows: Int64s) -> list[Interlaced] | None:
    """The whole table as rows that alternate; None where others are among them."""
    if not len(rows) or rows[:, Column.COUNT].min() < SHORT_ROW_ELEMS:
        return None
    found = []
    for index in alike_indices(rows):
        made = Interlaced.of(rows, index)
        if made is None:
            return None
        found.append(made)
    return found


class KeptRuns:
    """Which rows of a table alternate; kept, it serves tables of the same shapes elsewhere.

    Such are those of one program for other pages. What was found is checked each time. May be used
    on several threads: shapes and what was found for them are one value.
    """

    def __init__(self) -> None:
        """Nothing is known yet."""
        self._known: tuple[Int64s, list[Interlaced] | None] | None = None

    def interlaced(self, rows: Int64s) -> list[Interlaced] | None:
        """As `all_interlaced`, but looked for only when shapes have changed."""
        shapes = rows[:, Column.COUNT :]
        known = self._known
        if known is None or not np.array_equal(shapes, known[0]):
            found = all_interlaced(rows)
            self._known = shapes.copy(), found
            return found
        found = known[1]
        return found if found and all(one.holds(rows) for one in found) else None


def _turn(put: torch.Tensor, taken: torch.Tensor) -> None:
    """Copy [runs, ways, count] way by way: in one operation it would walk along the short axis."""
    ways = range(put.shape[1])
    if put.dtype != taken.dtype:
        for way in ways:
            put[:, way].copy_(taken[:, way])
        return
    target, source = put.numpy(), taken.numpy()
    for way in ways:
        target[:, way] = source[:, way]


def _rows_of(first: int, runs: int, rows_each: int) -> slice:
    return slice(first * rows_each, (first + runs) * rows_each)
