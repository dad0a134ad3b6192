"""Bind the rows of READ to contiguous pieces with an address on both sides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from restow.agents.binding.copies import AlikeRows, alike_rows, by_pair
from restow.agents.binding.operands import (
    DST,
    SRC,
    Lines,
    held_pages,
    in_regions,
    side_end,
    span_lines,
    staged_pages,
)
from restow.agents.binding.pages import SNAPSHOT, Blocks, RegionTable, TokenRange
from restow.broker.layout.rows import Bools, Int64s
from restow.broker.planner.program import Column, GroupPair

SPLIT_BYTES = 4096
"""Pieces are cut at multiples of this, counted from their beginning."""
PIECE_BYTES = 16 * 1024
"""Bytes that take as long to read as the overhead of a piece: 2.5 us at 6 GB/s."""


@dataclass(frozen=True, slots=True)
class Descriptors:
    """Contiguous copies of a READ, as int64 arrays of equal length."""

    src_address: Int64s
    dst_address: Int64s
    length_bytes: Int64s

    @property
    def size_bytes(self) -> int:
        """Bytes of all pieces."""
        return int(self.length_bytes.sum())

    @classmethod
    def single(cls, src_address: int, dst_address: int, length_bytes: int) -> Descriptors:
        """Return a single piece."""
        numbers = src_address, dst_address, length_bytes
        return cls(*(np.array([number], np.int64) for number in numbers))

    @classmethod
    def joined(cls, parts: Sequence[Descriptors]) -> Descriptors:
        """Join the pieces of all parts."""
        if len(parts) == 1:
            return parts[0]
        empty = np.empty(0, np.int64)
        return cls(
            np.concatenate([empty, *(part.src_address for part in parts)]),
            np.concatenate([empty, *(part.dst_address for part in parts)]),
            np.concatenate([empty, *(part.length_bytes for part in parts)]),
        )

    def cut(self, limit_bytes: int) -> Descriptors:
        """Return the same bytes in pieces of at most ``limit_bytes``."""
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
        """Return the same pieces, sorted by source address."""
        order = np.argsort(self.src_address)
        return Descriptors(
            self.src_address[order], self.dst_address[order], self.length_bytes[order]
        )

    def split(self, count: int) -> list[Descriptors]:
        """Return the same bytes in ``count`` parts of about equal duration; a piece may be cut."""
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
        """Return bytes ``[begin, end)``, counted over all pieces."""
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
class _Rows:
    """Rows that are bound alike, with their positions in the memory of both ranks."""

    alike: AlikeRows
    src: Lines
    dst: Lines
    length_bytes: Int64s

    @classmethod
    def of(cls, alike: AlikeRows, table: Int64s, src: RegionTable, dst: RegionTable) -> _Rows:
        """Look the rows up in ``table``."""
        rows = table.take(alike.index, axis=0)
        src_lines, dst_lines = (
            side_end(rows, memory, side, side).lines for memory, side in ((src, SRC), (dst, DST))
        )
        length = rows[..., Column.COUNT]
        if not alike.pair.per_token:
            # Rows are joined at page 0: at any other page, rows of a region keep the same distance.
            begins = breaks(src_lines.first_address, dst_lines.first_address, length)
            length = np.add.reduceat(length.ravel(), np.flatnonzero(begins))[:, None]
            src_lines, dst_lines = src_lines.some(begins), dst_lines.some(begins)
        return cls(alike, src_lines.kept(), dst_lines.kept(), length)


@dataclass(frozen=True, slots=True)
class Reads:
    """The direct rows of a program from one source rank, with positions in both ranks' memory.

    `of` does all work that does not depend on the handoff; keep the result to bind many handoffs.
    """

    parts: tuple[_Rows, ...]

    @classmethod
    def of(
        cls, rows: Int64s, pairs: Sequence[GroupPair], src: RegionTable, dst: RegionTable
    ) -> Reads:
        """Group the rows into parts that are bound alike."""
        parts = [
            _Rows.of(alike, rows, src, dst)
            for both in alike_rows(rows, pairs, (SRC, DST))
            for alike in both.by_region(rows)
        ]
        return cls(tuple(parts))

    def bind(self, src_blocks: Blocks, dst_blocks: Blocks, tokens: TokenRange) -> Descriptors:
        """Return the descriptors of one handoff.

        A row whose tokens follow each other without a gap on both sides becomes one descriptor for
        each stretch of tokens inside a page. Any other row becomes one descriptor for each token.
        Descriptors are ordered by region, page, and place in the page. Descriptors of one region
        that continue each other on both sides are joined. Raises `PageCountError` and
        `PageRangeError`.
        """
        descriptors = []
        for part in self.parts:
            pair, stretches = part.alike.pair, part.alike.stretches(tokens)
            descriptors.append(
                merged(
                    part.src.addresses(src_blocks.listed(pair.src, tokens), stretches),
                    part.dst.addresses(dst_blocks.listed(pair.dst, tokens), stretches),
                    part.length_bytes * stretches.count[:, None],
                )
            )
        return Descriptors.joined(descriptors)


@dataclass(frozen=True, slots=True)
class _Spans:
    """The spans of one pair of page lists, as arrays ``[spans, 1]``; ``index`` has span numbers."""

    pair: GroupPair
    index: Int64s
    src: Lines
    length_bytes: Int64s


@dataclass(frozen=True, slots=True)
class SpanReads:
    """The spans of one source rank, with positions in its memory; keep it to bind many handoffs."""

    parts: tuple[_Spans, ...]

    @classmethod
    def of(
        cls, spans: Int64s, chosen: Bools, pairs: Sequence[GroupPair], src: RegionTable
    ) -> SpanReads:
        """Build the reads of the ``chosen`` spans."""
        parts = []
        for pair, rows in by_pair(np.where(chosen, spans[:, Column.GROUP_PAIR], -1), pairs):
            index = rows[:, None]
            table = spans[index]
            lines = span_lines(table, src).kept()
            parts.append(_Spans(pair, index, lines, table[..., Column.COUNT]))
        return cls(tuple(parts))

    def bind(self, staged: RegionTable, src_blocks: Blocks, tokens: TokenRange) -> Descriptors:
        """Return the descriptors of one handoff, page by page into the regions of ``staged``.

        Raises `PageCountError` and `PageRangeError`.
        """
        descriptors = []
        for part in self.parts:
            if not len(part.pair.src_pages(tokens.start, tokens.stop)):
                continue
            src_address = part.src.addresses(held_pages(part.pair, src_blocks, tokens), SNAPSHOT)
            dst_address = in_regions(staged, part.index).addresses(
                staged_pages(part.pair, tokens), SNAPSHOT
            )
            lengths = part.length_bytes.repeat(src_address.shape[1], axis=1)
            descriptors.append(merged(src_address, dst_address, lengths))
        return Descriptors.joined(descriptors)


def merged(src_address: Int64s, dst_address: Int64s, lengths: Int64s) -> Descriptors:
    """Join pieces of a region that continue each other on both sides; arrays ``[regions, ...]``."""
    flat = [values.ravel() for values in (src_address, dst_address, lengths)]
    if len(flat[0]) == len(src_address):
        return Descriptors(*flat)
    begins = breaks(src_address, dst_address, lengths)
    first = np.flatnonzero(begins)
    if len(first) == begins.size:
        return Descriptors(*flat)
    src, dst, length = flat
    return Descriptors(src[first], dst[first], np.add.reduceat(length, first))


def breaks(src_address: Int64s, dst_address: Int64s, lengths: Int64s) -> Bools:
    """Mark pieces that do not continue the piece before on both sides; returns a flat mask.

    A region's first piece never continues another region's: a READ must not leave the registration
    in which it begins, even if two registrations are adjacent.
    """
    src, dst, length = (a.reshape(len(a), -1) for a in (src_address, dst_address, lengths))
    begins = np.ones(src.shape, np.bool_)
    begins[:, 1:] = src[:, 1:] - src[:, :-1] != length[:, :-1]
    begins[:, 1:] |= dst[:, 1:] - dst[:, :-1] != length[:, :-1]
    return begins.ravel()
