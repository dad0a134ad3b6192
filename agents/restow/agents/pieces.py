"""What binding makes: pieces of a READ, and strided copies of one launch, by address."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

import numpy as np

from restow.broker.layout.rows import Int64s
from restow.broker.planner.table import ITEM_BYTES

SPLIT_BYTES = 4096
"""Reads are split at multiples of this from their beginning."""


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
        return cls(
            np.concatenate([part.src_address for part in parts]),
            np.concatenate([part.dst_address for part in parts]),
            np.concatenate([part.length_bytes for part in parts]),
        )

    def split(self, count: int) -> list[Descriptors]:
        """The same bytes in ``count`` parts of about equal size; a piece may be cut in several."""
        stops = np.cumsum(self.length_bytes)
        cuts = self.size_bytes * np.arange(1, count) // count // SPLIT_BYTES * SPLIT_BYTES
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
class Copies:
    """Strided copies of one GATHER or SCATTER: int64 arrays of equal length.

    ``src_dtype`` and ``dst_dtype`` are `DType` numbers; equal ones copy bytes unchanged.
    """

    src_address: Int64s
    dst_address: Int64s
    count: Int64s
    src_step_bytes: Int64s
    dst_step_bytes: Int64s
    src_dtype: Int64s
    dst_dtype: Int64s

    @property
    def size_bytes(self) -> int:
        """Bytes that are written."""
        return int((self.count * ITEM_BYTES[self.dst_dtype]).sum())

    @classmethod
    def joined(cls, parts: Sequence[Copies]) -> Copies:
        """All copies of all parts, for one launch."""
        if len(parts) == 1:
            return parts[0]
        columns = ([getattr(part, column.name) for part in parts] for column in fields(cls))
        return cls(*(np.concatenate(arrays) for arrays in columns))


def copies_of(src: Int64s, dst: Int64s) -> Copies:
    """From the ends of all copies: int64 ``[4, copies]`` each, address, count, step, dtype."""
    return Copies(src[0], dst[0], src[1], src[2], dst[2], src[3], dst[3])
