"""Rows whose elements alternate in memory: k rows with k elements' steps fill one run.

A transposed copy looks so on one of its sides: the K-1 taps of a conv window, channel by channel.
The runs move as voids; only a temporary in cache is walked with a stride.
"""

from dataclasses import dataclass

import numpy as np
import torch

from restow.kernels.codes import DST_BYTES, SRC_BYTES, Column, Int64s
from restow.kernels.host.rows import DTYPES, Rows

CHUNK_ELEMS = 16 * 1024
"""In one operation of torch: with more it may fork."""
TURN_CHUNK_ELEMS = 64 * 1024
"""In one operation of numpy, which never forks; two such temporaries stay in L2."""


@dataclass(frozen=True, slots=True, eq=False)
class Interlaced:
    """Rows of equal shape, ``rows`` [runs, ways, 6]: those of a run alternate on ``side``."""

    rows: Int64s
    side: Column

    @classmethod
    def of(cls, rows: Int64s) -> "Interlaced | None":
        """Rows of equal shape, sorted into runs; None if they do not alternate."""
        _, src_step, dst_step, code = rows[0, Column.COUNT :].tolist()
        src_bytes, dst_bytes = int(SRC_BYTES[code]), int(DST_BYTES[code])
        if src_step == src_bytes:
            ways, side, unit_bytes = dst_step // dst_bytes, Column.DST_ADDRESS, dst_bytes
        elif dst_step == dst_bytes:
            ways, side, unit_bytes = src_step // src_bytes, Column.SRC_ADDRESS, src_bytes
        else:
            return None
        if ways < 2 or len(rows) % ways:
            return None
        order = np.argsort(rows[:, side], kind="stable")
        runs = rows[order].reshape(-1, ways, len(Column))
        address = runs[:, :, side]
        if np.any(address[:, 1:] - address[:, :-1] != unit_bytes):
            return None
        return cls(runs, side)

    def copy(self) -> None:
        """Copy all rows."""
        runs, ways, _ = self.rows.shape
        count, code = int(self.rows[0, 0, Column.COUNT]), int(self.rows[0, 0, Column.CODE])
        src_dtype, dst_dtype = DTYPES[code]
        src, dst = self.rows[:, :, Column.SRC_ADDRESS], self.rows[:, :, Column.DST_ADDRESS]
        apart = self.side is Column.DST_ADDRESS
        if apart:
            source = Rows(src.ravel(), count, src_dtype.itemsize, src_dtype)
            target = Rows(dst[:, 0], count * ways, dst_dtype.itemsize, dst_dtype)
        else:
            source = Rows(src[:, 0], count * ways, src_dtype.itemsize, src_dtype)
            target = Rows(dst.ravel(), count, dst_dtype.itemsize, dst_dtype)
        chunk = TURN_CHUNK_ELEMS if src_dtype == dst_dtype else CHUNK_ELEMS
        step = max(1, chunk // count)
        for first in range(0, runs, step):
            n = min(step, runs - first)
            taken = source.read(_rows_of(first, n, source.n // runs))
            if apart:
                values = torch.empty((n, count, ways), dtype=dst_dtype)
                put, taken = values.transpose(1, 2), taken.view(n, ways, count)
            else:
                put = values = torch.empty((n, ways, count), dtype=dst_dtype)
                taken = taken.view(n, count, ways).transpose(1, 2)
            _turn(put, taken)
            whole = values.view(-1, target.count)
            target.write(_rows_of(first, n, target.n // runs), whole)


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
