"""Bind rows that are read straight into place: laid over the memory of both ranks, pages open."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from restow.agents.binding.addresses import DST, SRC, Lines, by_pair, cut, pages_of
from restow.agents.binding.pages import Blocks, RegionTable, Tokens, check_pages
from restow.agents.binding.pieces import Descriptors
from restow.broker.layout.rows import Bools, Int64s
from restow.broker.planner.program import Column, GroupPair


@dataclass(frozen=True, slots=True)
class _TokenRows:
    """Rows that are bound alike: ``[regions, 1, rows]``, regions with equally many rows.

    ``whole``: their tokens follow each other without a gap on both sides.
    """

    pair: GroupPair
    whole: bool
    src: Lines
    dst: Lines
    length_bytes: Int64s

    def bind(self, src_blocks: Blocks, dst_blocks: Blocks, tokens: Tokens) -> Int64s:
        """Descriptors as ``[3, descriptors]``."""
        pair = self.pair
        stretches = cut(pair, (SRC, DST), tokens, self.whole)
        src_pages = pages_of(pair, SRC, src_blocks, tokens)
        dst_pages = pages_of(pair, DST, dst_blocks, tokens)
        src_address = self.src.addresses(src_pages, pair.src, stretches)
        dst_address = self.dst.addresses(dst_pages, pair.dst, stretches)
        repeats = stretches.count if self.whole else np.ones_like(stretches.count)
        return merged(src_address, dst_address, self.length_bytes * repeats[:, None])


@dataclass(frozen=True, slots=True)
class _SnapshotRows:
    """Rows of one page on each side, joined already: ``src`` and ``dst`` are lines ``[rows]``."""

    pair: GroupPair
    src: Lines
    dst: Lines
    length_bytes: Int64s

    @classmethod
    def of(cls, rows: _TokenRows) -> _SnapshotRows:
        """Join the rows at page 0: those of a region keep their distance at any other."""
        src, dst = (lines.first_address for lines in (rows.src, rows.dst))
        begins = breaks(src, dst, rows.length_bytes)
        lengths = np.add.reduceat(rows.length_bytes.ravel(), np.flatnonzero(begins))
        return cls(rows.pair, rows.src.some(begins), rows.dst.some(begins), lengths)

    def bind(self, src_blocks: Blocks, dst_blocks: Blocks, tokens: Tokens) -> Int64s:
        """Descriptors as ``[3, descriptors]``."""
        table = np.empty((3, len(self.length_bytes)), np.int64)
        for column, lines, blocks in ((0, self.src, src_blocks), (1, self.dst, dst_blocks)):
            pages = pages_of(self.pair, lines.side, blocks, tokens)
            check_pages(pages, lines.page_count, lines.side.name)
            np.multiply(lines.page_stride_bytes, pages, out=table[column])
            table[column] += lines.first_address
        table[2] = self.length_bytes
        return table


@dataclass(frozen=True, slots=True)
class Reads:
    """The direct rows of one program from one source rank, laid over the memory of both ranks.

    All that does not depend on the handoff is done in `of`; keep it to bind many handoffs.
    """

    parts: tuple[_TokenRows | _SnapshotRows, ...]

    @classmethod
    def of(
        cls, rows: Int64s, pairs: Sequence[GroupPair], src: RegionTable, dst: RegionTable
    ) -> Reads:
        """Sort the rows into parts."""
        parts: list[_TokenRows | _SnapshotRows] = []
        for pair, table in by_pair(rows, pairs):
            joined = SRC.joined(table) & DST.joined(table)
            for some, whole in ((table[joined], True), (table[~joined], False)):
                for alike in by_region(some):
                    lines = Lines.of(alike, src, SRC), Lines.of(alike, dst, DST)
                    part = _TokenRows(pair, whole, *lines, alike[:, None, :, Column.COUNT])
                    parts.append(part if pair.per_token else _SnapshotRows.of(part))
        return cls(tuple(parts))

    def bind(self, src_blocks: Blocks, dst_blocks: Blocks, tokens: Tokens) -> Descriptors:
        """The descriptors of one handoff.

        A row whose tokens follow each other without a gap on both sides becomes one descriptor for
        each stretch of tokens inside a page; any other row one for each token. They are in the
        order of region, page, place in the page, and those that continue each other on both sides,
        inside one region, are one. Raises `PageCountError` and `PageRangeError`.
        """
        tables = [part.bind(src_blocks, dst_blocks, tokens) for part in self.parts]
        return Descriptors(*np.concatenate([np.empty((3, 0), np.int64), *tables], axis=1))


def by_region(rows: Int64s) -> Iterator[Int64s]:
    """The rows as ``[regions, rows, len(Column)]``, once for each number of rows in a region."""
    if not len(rows):
        return
    regions = rows[:, [Column.SRC_REGION, Column.DST_REGION]]
    begins = np.concatenate([[True], (regions[1:] != regions[:-1]).any(axis=1)])
    first = np.flatnonzero(begins)
    counts = np.diff(first, append=len(rows))
    for count in np.unique(counts):
        yield rows[first[counts == count, None] + np.arange(count)]


def merged(src_address: Int64s, dst_address: Int64s, lengths: Int64s) -> Int64s:
    """Join what continues on both sides: ``[regions, ...]`` to ``[3, descriptors]``."""
    begins = breaks(src_address, dst_address, lengths)
    table = np.array([src_address.ravel(), dst_address.ravel(), lengths.ravel()])
    first = np.flatnonzero(begins)
    if len(first) == begins.size:
        return table
    joined = table[:, first]
    joined[2] = np.add.reduceat(table[2], first)
    return joined


def breaks(src_address: Int64s, dst_address: Int64s, lengths: Int64s) -> Bools:
    """Mask of what does not continue on both sides what stands before it, flat.

    Never from one region into the next: a READ must not leave the registration it begins in, even
    where two lie side by side.
    """
    src, dst, length = (a.reshape(len(a), -1) for a in (src_address, dst_address, lengths))
    begins = np.ones(src.shape, np.bool_)
    begins[:, 1:] = src[:, 1:] - src[:, :-1] != length[:, :-1]
    begins[:, 1:] |= dst[:, 1:] - dst[:, :-1] != length[:, :-1]
    return begins.ravel()
