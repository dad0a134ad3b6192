"""The bytes that one rank reads from another, on either side, in the order of their digest.

Both agents derive the same order from the program and the tokens alone. Neither has to know the
other's addresses, or how D joins and splits its reads. Reads of direct rows come first, by pair of
page lists, region, stretch of tokens and row. The staged run follows, then the pages of spans.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from restow.agents.binding.copies import alike_rows, by_pair
from restow.agents.binding.operands import (
    DST,
    SRC,
    SideColumns,
    held_pages,
    in_regions,
    side_end,
    span_lines,
    staged_pages,
)
from restow.agents.binding.pages import SNAPSHOT, Blocks, RegionTable, TokenRange
from restow.broker.layout.rows import Int64s
from restow.broker.planner.program import READ_PAGES, READ_SPANS, Column, GroupPair, Program


@dataclass(frozen=True, slots=True)
class Extents:
    """Contiguous bytes of one memory, in order, as int64 arrays of equal length."""

    address: Int64s
    length_bytes: Int64s

    @property
    def size_bytes(self) -> int:
        """Bytes of all extents."""
        return int(self.length_bytes.sum())

    @classmethod
    def joined(cls, parts: Sequence[Extents]) -> Extents:
        """Concatenate all parts in order, and join extents that continue the extent before."""
        empty = np.empty(0, np.int64)
        address = np.concatenate([empty, *(part.address for part in parts)])
        length = np.concatenate([empty, *(part.length_bytes for part in parts)])
        begins = np.ones(len(address), np.bool_)
        begins[1:] = address[1:] != address[:-1] + length[:-1]
        if begins.all():
            return cls(address, length)
        return cls(address[begins], np.add.reduceat(length, np.flatnonzero(begins)))

    def chunks(self, size_bytes: int) -> Iterator[Extents]:
        """Yield the same bytes in parts of ``size_bytes``; the last part may be shorter."""
        stops = np.cumsum(self.length_bytes)
        total = int(stops[-1]) if len(stops) else 0
        for begin in range(0, total, size_bytes):
            end = min(begin + size_bytes, total)
            first, last = np.searchsorted(stops, begin, "right"), np.searchsorted(stops, end)
            address, length = (
                column[first : last + 1].copy() for column in (self.address, self.length_bytes)
            )
            skipped = begin - (stops[first] - length[0])
            address[0] += skipped
            length[0] -= skipped
            length[-1] -= stops[last] - end
            yield Extents(address, length)


def one_extent(address: int, length_bytes: int) -> Extents:
    """Return a single extent, or none if it has no bytes."""
    whole = slice(0, 1 if length_bytes else 0)
    return Extents(np.array([address])[whole], np.array([length_bytes])[whole])


def source_extents(
    program: Program,
    src_rank: int,
    memory: RegionTable,
    blocks: Blocks,
    tokens: TokenRange,
    staged: Extents,
) -> Extents:
    """Return all bytes that ``program`` reads from a rank, as that rank finds them in its memory.

    ``memory`` is the source rank's own, and ``staged`` its gathered run. Raises `PageCountError`
    and `PageRangeError`.
    """
    return Extents.joined(
        [
            *direct_extents(program, src_rank, memory, SRC, blocks, tokens),
            staged,
            *own_span_extents(program, src_rank, memory, blocks, tokens),
        ]
    )


def direct_extents(
    program: Program,
    src_rank: int,
    memory: RegionTable,
    side: SideColumns,
    blocks: Blocks,
    tokens: TokenRange,
) -> list[Extents]:
    """Return the bytes of a source rank's direct rows, on the given side.

    Raises `PageCountError` and `PageRangeError`.
    """
    extents = []
    rows = program.rows(READ_PAGES, src_rank)
    # The pages of both sides cut the rows on both sides; otherwise the two orders would differ.
    for both in alike_rows(rows, program.group_pairs, (SRC, DST)):
        stretches = both.stretches(tokens)
        pages = blocks.listed(side.form(both.pair), tokens)
        for alike in both.by_region(rows):
            bound = rows.take(alike.index, axis=0)
            address = side_end(bound, memory, side, side).lines.addresses(pages, stretches)
            length = bound[..., Column.COUNT] * stretches.count[:, None]
            extents.append(Extents(address.ravel(), length.ravel()))
    return extents


def own_span_extents(
    program: Program, src_rank: int, memory: RegionTable, blocks: Blocks, tokens: TokenRange
) -> list[Extents]:
    """Return the bytes of a source rank's spans, in its own pages.

    Raises `PageCountError` and `PageRangeError`.
    """
    extents = []
    for pair, index in _spans(program, src_rank, tokens):
        spans = program.rows(READ_SPANS)[index]
        pages = held_pages(pair, blocks, tokens)
        extents.append(_whole_pages(span_lines(spans, memory).addresses(pages, SNAPSHOT), spans))
    return extents


def staged_span_extents(
    program: Program, src_rank: int, staged: RegionTable, tokens: TokenRange
) -> list[Extents]:
    """Return the bytes of a rank's spans in the reader's staging; span ``i`` is region ``i``."""
    extents = []
    for pair, index in _spans(program, src_rank, tokens):
        address = in_regions(staged, index).addresses(staged_pages(pair, tokens), SNAPSHOT)
        extents.append(_whole_pages(address, program.rows(READ_SPANS)[index]))
    return extents


def _spans(
    program: Program, src_rank: int, tokens: TokenRange
) -> Iterator[tuple[GroupPair, Int64s]]:
    """Yield a rank's spans that have pages, as ``[spans, 1]``, by pair of page lists."""
    spans = program.rows(READ_SPANS)
    mine = spans[:, Column.SRC_RANK] == src_rank
    numbers = np.where(mine, spans[:, Column.GROUP_PAIR], -1)
    for pair, index in by_pair(numbers, program.group_pairs):
        if len(pair.src_pages(tokens.start, tokens.stop)):
            yield pair, index[:, None]


def _whole_pages(address: Int64s, spans: Int64s) -> Extents:
    length = spans[..., Column.COUNT].repeat(address.shape[1], axis=1)
    return Extents(address.ravel(), length.ravel())
