"""What binding makes: pieces of a READ, and strided copies of one launch, by address."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from restow.broker.layout.dtype import ITEM_BYTES
from restow.broker.layout.rows import Int64s

SPLIT_BYTES = 4096
"""Pieces are cut at multiples of this from their beginning."""
PIECE_BYTES = 16 * 1024
"""What is read in the time that a piece costs beyond its bytes: 2.5 us at 6 GB/s."""


@dataclass(frozen=True, slots=True)
class Descriptors:
    """Contiguous copies of one READ: int64 arrays of equal length."""

    src_address: Int64s
    dst_address: Int64s
    length_bytes: Int64s

    @property
    def size_bytes(self) -> int:
        """Bytes of all pieces."""
        return int(self.length_bytes.sum())

    @classmethod
    def joined(cls, parts: Sequence[Descriptors]) -> Descriptors:
        """All pieces of all parts."""
        if len(parts) == 1:
            return parts[0]
        empty = np.empty(0, np.int64)
        return cls(
            np.concatenate([empty, *(part.src_address for part in parts)]),
            np.concatenate([empty, *(part.dst_address for part in parts)]),
            np.concatenate([empty, *(part.length_bytes for part in parts)]),
        )

    def cut(self, limit_bytes: int) -> Descriptors:
        """The same bytes in pieces of at most so many."""
        if not (self.length_bytes > limit_bytes).any():
            return self
        parts = np.maximum(-(-self.length_bytes // limit_bytes), 1)
        index = np.repeat(np.arange(len(parts)), parts)
        first = np.cumsum(parts) - parts
        offset = limit_bytes * (np.arange(len(index)) - first[index])
        return Descriptors(
            self.src_address[index] + offset,
            self.dst_address[index] + offset,
            np.minimum(self.length_bytes[index] - offset, limit_bytes),
        )

    def in_source_order(self) -> Descriptors:
        """The same pieces, by where they are read."""
        order = np.argsort(self.src_address)
        return Descriptors(
            self.src_address[order], self.dst_address[order], self.length_bytes[order]
        )

    def split(self, count: int) -> list[Descriptors]:
        """The same bytes in ``count`` parts that take about as long; a piece may be cut."""
        stops = np.cumsum(self.length_bytes)
        efforts = stops + PIECE_BYTES * np.arange(1, len(stops) + 1)
        at = efforts[-1] * np.arange(1, count) // count
        index = np.searchsorted(efforts, at)
        begins = stops[index] - self.length_bytes[index]
        inside = np.maximum(at - efforts[index] + self.length_bytes[index], 0)
        cuts = begins + inside // SPLIT_BYTES * SPLIT_BYTES
        bounds = [0, *cuts.tolist(), self.size_bytes]
        return [self._part(stops, begin, end) for begin, end in pairwise(bounds)]

    def _part(self, stops: Int64s, begin: int, end: int) -> Descriptors:
        """Bytes ``[begin, end)`` of all."""
        first, last = np.searchsorted(stops, begin, "right"), np.searchsorted(stops, end, "left")
        pieces = slice(first, last + 1 if end > begin else first)
        src, dst, length = (
            column[pieces].copy()
            for column in (self.src_address, self.dst_address, self.length_bytes)
        )
        if len(length):
            skipped = begin - (stops[first] - length[0])
            src[0] += skipped
            dst[0] += skipped
            length[0] -= skipped
            length[-1] -= stops[last] - end
        return Descriptors(src, dst, length)


@dataclass(frozen=True, slots=True)
class Grid:
    """Strided copies: int64 arrays that broadcast to the shape of the addresses.

    ``src_dtype`` and ``dst_dtype`` are `DType` numbers; equal ones copy bytes unchanged.
    """

    src_address: Int64s
    dst_address: Int64s
    count: Int64s
    src_step_bytes: Int64s
    dst_step_bytes: Int64s
    src_dtype: Int64s
    dst_dtype: Int64s

    def run_bytes(self) -> int:
        """Bytes of every copy, where all are contiguous, unchanged and of equally many; else 0."""
        if not self.count.size or self.src_address.shape != self.dst_address.shape:
            return 0
        count, dtype = self.count.flat[0], self.src_dtype.flat[0]
        item = ITEM_BYTES[dtype]
        alike = (
            (self.count == count).all()
            and (self.src_dtype == dtype).all()
            and (self.dst_dtype == dtype).all()
            and (self.src_step_bytes == item).all()
            and (self.dst_step_bytes == item).all()
        )
        return int(count * item) if alike else 0

    @property
    def size_bytes(self) -> int:
        """Bytes that are written."""
        sizes = self.count * ITEM_BYTES[self.dst_dtype]
        return int(np.broadcast_to(sizes, self.src_address.shape).sum())


class EqualRuns(NamedTuple):
    """Copies of contiguous bytes, of equally many each: int64 addresses ``[n]``."""

    src_address: Int64s
    dst_address: Int64s
    length_bytes: int


@dataclass(frozen=True, slots=True)
class Copies:
    """All copies of one GATHER or SCATTER."""

    grids: tuple[Grid, ...] = ()

    def __len__(self) -> int:
        """How many rows of elements are copied."""
        return sum(grid.src_address.size for grid in self.grids)

    @property
    def size_bytes(self) -> int:
        """Bytes that are written."""
        return sum(grid.size_bytes for grid in self.grids)

    def equal_runs(self) -> EqualRuns | None:
        """The same copies, if they are plainly such, as those of pages of one size are.

        None also where one has no address, or elements do not lie at multiples of their size.
        """
        length, *others = {grid.run_bytes() for grid in self.grids} or {0}
        if others or length <= 0:
            return None
        src, dst = (
            np.concatenate([one.ravel() for one in each]) if len(each) > 1 else each[0].ravel()
            for each in zip(*((g.src_address, g.dst_address) for g in self.grids), strict=True)
        )
        item = max(int(ITEM_BYTES[grid.src_dtype].max()) for grid in self.grids)
        crooked = int(np.bitwise_or.reduce(src) | np.bitwise_or.reduce(dst)) % item
        return None if crooked or min(src.min(), dst.min()) <= 0 else EqualRuns(src, dst, length)

    @classmethod
    def joined(cls, parts: Sequence[Copies]) -> Copies:
        """All copies of all parts, for one launch."""
        return cls(tuple(grid for part in parts for grid in part.grids))
