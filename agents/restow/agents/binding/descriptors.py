"""What a READ is made of: contiguous pieces, by address on both sides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

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
