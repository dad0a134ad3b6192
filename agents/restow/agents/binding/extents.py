"""Where the bytes lie that one rank reads from another, on either side, in an order of its own.

Both agents put these in the same order, though neither knows the other's addresses, and whatever
reads D joins or shares out: it follows from the program and the tokens alone. Reads of direct rows
come first, by pair of page lists, region, stretch of tokens and row; then the staged run; then
pages of spans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from restow.agents.binding.addresses import DST, SRC, Lines, Side, by_pair, cut, pages_of
from restow.agents.binding.pages import Blocks, RegionTable, Tokens, check_pages
from restow.agents.binding.reads import by_region
from restow.broker.layout.rows import Int64s
from restow.broker.planner.program import READ_PAGES, READ_SPANS, Column, GroupPair, Program


@dataclass(frozen=True, slots=True)
class Extents:
    """Contiguous bytes of one memory, in order: int64 arrays of equal length."""

    address: Int64s
    length_bytes: Int64s

    @property
    def size_bytes(self) -> int:
        """Bytes of all."""
        return int(self.length_bytes.sum())

    @classmethod
    def joined(cls, parts: Sequence[Extents]) -> Extents:
        """All parts in their order; what continues what stands before it is one with it."""
        empty = np.empty(0, np.int64)
        address = np.concatenate([empty, *(part.address for part in parts)])
        length = np.concatenate([empty, *(part.length_bytes for part in parts)])
        begins = np.ones(len(address), np.bool_)
        begins[1:] = address[1:] != address[:-1] + length[:-1]
        if begins.all():
            return cls(address, length)
        return cls(address[begins], np.add.reduceat(length, np.flatnonzero(begins)))

    def chunks(self, size_bytes: int) -> Iterator[Extents]:
        """The same bytes in parts of ``size_bytes``, the last one of what is left."""
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
    """A single run; none if it has no bytes."""
    whole = slice(0, 1 if length_bytes else 0)
    return Extents(np.array([address])[whole], np.array([length_bytes])[whole])


def source_extents(
    program: Program,
    src_rank: int,
    memory: RegionTable,
    blocks: Blocks,
    tokens: Tokens,
    staged: Extents,
) -> Extents:
    """All that ``program`` has read from a source rank, in its own ``memory`` and ``staged`` run.

    Raises `PageCountError` and `PageRangeError`.
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
    side: Side,
    blocks: Blocks,
    tokens: Tokens,
) -> list[Extents]:
    """Those of the direct rows of a source rank. Raises `PageCountError` and `PageRangeError`."""
    found = []
    rows = program.rows(READ_PAGES)[program.rows(READ_PAGES)[:, Column.SRC_RANK] == src_rank]
    for pair, table in by_pair(rows, program.group_pairs):
        joined = SRC.joined(table) & DST.joined(table)
        for some, whole in ((table[joined], True), (table[~joined], False)):
            # By the pages of both sides on both sides: else rows would take turns differently.
            stretches = cut(pair, (SRC, DST), tokens, whole)
            pages = pages_of(pair, side, blocks, tokens)
            for alike in by_region(some):
                lines = Lines.of(alike, memory, side)
                address = lines.addresses(pages, side.form(pair), stretches)
                repeats = stretches.count if whole else np.ones_like(stretches.count)
                length = alike[:, None, :, Column.COUNT] * repeats[:, None]
                found.append(Extents(address.ravel(), length.ravel()))
    return found


def own_span_extents(
    program: Program, src_rank: int, memory: RegionTable, blocks: Blocks, tokens: Tokens
) -> list[Extents]:
    """Those of the spans of a source rank in its pages.

    Raises `PageCountError` and `PageRangeError`.
    """
    spans = program.rows(READ_SPANS)[program.rows(READ_SPANS)[:, Column.SRC_RANK] == src_rank]
    region = spans[:, Column.SRC_REGION]

    def pages(pair: GroupPair, held: range, mine: Int64s) -> Int64s:
        ids = pages_of(pair, SRC, blocks, tokens)[held.start : held.stop]
        check_pages(ids, int(memory.page_count[region[mine]].min()), SRC.name)
        return ids

    base = memory.base_address[region] + spans[:, Column.SRC_OFFSET_BYTES]
    strides = memory.page_stride_bytes[region]
    return _span_extents(spans, program.group_pairs, tokens, base, strides, pages)


def staged_span_extents(
    program: Program, src_rank: int, staged: RegionTable, tokens: Tokens
) -> list[Extents]:
    """Those of the spans of a source rank where they were read to: span ``i`` is region ``i``."""
    mine = np.flatnonzero(program.rows(READ_SPANS)[:, Column.SRC_RANK] == src_rank)
    return _span_extents(
        program.rows(READ_SPANS)[mine],
        program.group_pairs,
        tokens,
        staged.base_address[mine],
        staged.page_stride_bytes[mine],
        lambda pair, held, _: np.arange(len(held)),
    )


def _span_extents(
    spans: Int64s,
    pairs: Sequence[GroupPair],
    tokens: Tokens,
    base_address: Int64s,
    stride_bytes: Int64s,
    pages_of_pair: Callable[[GroupPair, range, Int64s], Int64s],
) -> list[Extents]:
    found = []
    for number, pair in enumerate(pairs):
        mine = np.flatnonzero(spans[:, Column.GROUP_PAIR] == number)
        held = pair.src_pages(tokens.start, tokens.stop)
        if len(mine) and len(held):
            pages = pages_of_pair(pair, held, mine)
            address = base_address[mine, None] + stride_bytes[mine, None] * pages
            length = np.broadcast_to(spans[mine, Column.COUNT, None], address.shape)
            found.append(Extents(address.ravel(), length.ravel()))
    return found
