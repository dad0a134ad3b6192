"""Bind rows of snapshots that go through a chunk: from pages into it, and out of it to pages.

A chunk lies at the beginning of a staged run; rows say where in it (`planner.ways.interleave`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from restow.agents.binding.addresses import DST, SRC, Lines, Side, by_pair, pages_of
from restow.agents.binding.copies import Blocks, RegionTable
from restow.agents.binding.pages import SNAPSHOT, Tokens
from restow.agents.binding.pieces import Copies, Ends, grid
from restow.broker.layout.rows import Int64s
from restow.broker.planner.program import Column, GroupPair

_ONE = Tokens(0, 1)


def bind_interleave(
    rows: Int64s,
    pairs: Sequence[GroupPair],
    src: RegionTable,
    src_blocks: Blocks,
    chunk_address: int,
) -> Copies:
    """Copies from pages into the chunk. Raises `PageCountError` and `PageRangeError`."""
    ends = _ends(rows, pairs, src, src_blocks, chunk_address, SRC, DST)
    return Copies(tuple(grid(memory, chunk, count) for memory, chunk, count in ends))


def bind_restore(
    rows: Int64s,
    pairs: Sequence[GroupPair],
    dst: RegionTable,
    dst_blocks: Blocks,
    chunk_address: int,
) -> Copies:
    """Copies from the chunk to pages. Raises `PageCountError` and `PageRangeError`."""
    ends = _ends(rows, pairs, dst, dst_blocks, chunk_address, DST, SRC)
    return Copies(tuple(grid(chunk, memory, count) for memory, chunk, count in ends))


def _ends(
    rows: Int64s,
    pairs: Sequence[GroupPair],
    regions: RegionTable,
    blocks: Blocks,
    chunk_address: int,
    side: Side,
    other: Side,
) -> Iterator[tuple[Ends, Ends, Int64s]]:
    """The ends in memory, on ``side`` of the rows, and in the chunk, and counts."""
    for pair, part in by_pair(rows, pairs):
        pages = pages_of(pair, side, blocks, _ONE)
        lines = Lines.of(part, regions, side)
        (memory,) = lines.addresses(pages, side.form(pair), SNAPSHOT)
        chunk = chunk_address + part[:, other.offset]
        here, there = (
            Ends(address, part[:, one.step], part[:, one.dtype])
            for address, one in ((memory, side), (chunk, other))
        )
        yield here, there, part[:, Column.COUNT]
