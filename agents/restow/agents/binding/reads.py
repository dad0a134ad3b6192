"""Bind what is read from one source, pages open: rows straight into place, spans into staging."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from restow.agents.binding.addresses import Lines
from restow.agents.binding.alike_rows import AlikeRows, alike_rows, by_pair
from restow.agents.binding.descriptors import Descriptors
from restow.agents.binding.operands import (
    DST,
    SRC,
    held_pages,
    in_regions,
    side_end,
    span_lines,
    staged_pages,
)
from restow.agents.binding.pages import SNAPSHOT, Blocks, RegionTable, Tokens
from restow.broker.layout.rows import Bools, Int64s
from restow.broker.planner.program import Column, GroupPair


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows that are bound alike, laid over the memory of both ranks."""

    alike: AlikeRows
    src: Lines
    dst: Lines
    length_bytes: Int64s

    @classmethod
    def of(cls, alike: AlikeRows, table: Int64s, src: RegionTable, dst: RegionTable) -> _Rows:
        """Those of ``table``."""
        rows = table.take(alike.index, axis=0)
        there, here = (
            side_end(rows, memory, side, side).lines for memory, side in ((src, SRC), (dst, DST))
        )
        length = rows[..., Column.COUNT]
        if not alike.pair.per_token:
            # Joined at page 0: those of a region keep their distance at any other.
            begins = breaks(there.first_address, here.first_address, length)
            length = np.add.reduceat(length.ravel(), np.flatnonzero(begins))[:, None]
            there, here = there.some(begins), here.some(begins)
        return cls(alike, there.kept(), here.kept(), length)


@dataclass(frozen=True, slots=True)
class Reads:
    """The direct rows of one program from one source rank, laid over the memory of both ranks.

    All that does not depend on the handoff is done in `of`; keep it to bind many handoffs.
    """

    parts: tuple[_Rows, ...]

    @classmethod
    def of(
        cls, rows: Int64s, pairs: Sequence[GroupPair], src: RegionTable, dst: RegionTable
    ) -> Reads:
        """Sort the rows into parts."""
        found = [
            _Rows.of(alike, rows, src, dst)
            for both in alike_rows(rows, pairs, (SRC, DST))
            for alike in both.by_region(rows)
        ]
        return cls(tuple(found))

    def bind(self, src_blocks: Blocks, dst_blocks: Blocks, tokens: Tokens) -> Descriptors:
        """The descriptors of one handoff.

        A row whose tokens follow each other without a gap on both sides becomes one descriptor for
        each stretch of tokens inside a page; any other row one for each token. They are in the
        order of region, page, place in the page, and those that continue each other on both sides,
        inside one region, are one. Raises `PageCountError` and `PageRangeError`.
        """
        found = []
        for part in self.parts:
            pair, stretches = part.alike.pair, part.alike.stretches(tokens)
            found.append(
                merged(
                    part.src.addresses(src_blocks.listed(pair.src, tokens), stretches),
                    part.dst.addresses(dst_blocks.listed(pair.dst, tokens), stretches),
                    part.length_bytes * stretches.count[:, None],
                )
            )
        return Descriptors.joined(found)


@dataclass(frozen=True, slots=True)
class _Spans:
    """The spans of one pair of page lists: arrays ``[spans, 1]``, ``index`` that of each span."""

    pair: GroupPair
    index: Int64s
    src: Lines
    length_bytes: Int64s


@dataclass(frozen=True, slots=True)
class SpanReads:
    """Spans that have one source rank, laid over its memory; keep it to bind many handoffs."""

    parts: tuple[_Spans, ...]

    @classmethod
    def of(
        cls, spans: Int64s, chosen: Bools, pairs: Sequence[GroupPair], src: RegionTable
    ) -> SpanReads:
        """Of the ``chosen`` ones."""
        found = []
        for pair, rows in by_pair(np.where(chosen, spans[:, Column.GROUP_PAIR], -1), pairs):
            index = rows[:, None]
            table = spans[index]
            lines = span_lines(table, src).kept()
            found.append(_Spans(pair, index, lines, table[..., Column.COUNT]))
        return cls(tuple(found))

    def bind(self, staged: RegionTable, src_blocks: Blocks, tokens: Tokens) -> Descriptors:
        """The descriptors of one handoff, to where the spans are ``staged``: page after page.

        Raises `PageCountError` and `PageRangeError`.
        """
        found = []
        for part in self.parts:
            if not len(part.pair.src_pages(tokens.start, tokens.stop)):
                continue
            there = part.src.addresses(held_pages(part.pair, src_blocks, tokens), SNAPSHOT)
            here = in_regions(staged, part.index).addresses(
                staged_pages(part.pair, tokens), SNAPSHOT
            )
            lengths = part.length_bytes.repeat(there.shape[1], axis=1)
            found.append(merged(there, here, lengths))
        return Descriptors.joined(found)


def merged(src_address: Int64s, dst_address: Int64s, lengths: Int64s) -> Descriptors:
    """Join what continues on both sides, inside one region: arrays ``[regions, ...]``."""
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
    """Mask of what does not continue on both sides what stands before it, flat.

    Never from one region into the next: a READ must not leave the registration it begins in, even
    where two lie side by side.
    """
    src, dst, length = (a.reshape(len(a), -1) for a in (src_address, dst_address, lengths))
    begins = np.ones(src.shape, np.bool_)
    begins[:, 1:] = src[:, 1:] - src[:, :-1] != length[:, :-1]
    begins[:, 1:] |= dst[:, 1:] - dst[:, :-1] != length[:, :-1]
    return begins.ravel()
