"""Bind a program's rows to the pages of one handoff: from rows to addresses, with numpy alone.

Law: element ``i`` of a row at token ``t`` lies at ``base + page * page_stride + offset +
(t % page_tokens) * token_stride + i * step`` on each side, where ``page`` is the one that holds
token ``t``. Nothing here loops over pages, tokens or rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from restow.agents.paging import Blocks, RegionTable, Tokens
from restow.agents.pieces import Copies, Descriptors, Ends, grid
from restow.agents.sides import DST, SRC, Lines, Side, by_pair, cut, pages_of
from restow.broker.layout.rows import Int64s
from restow.broker.planner.program import Column, GroupPair
from restow.broker.planner.table import ITEM_BYTES

__all__ = [
    "STAGING_ALIGN_BYTES",
    "Blocks",
    "Reads",
    "RegionTable",
    "Tokens",
    "bind_gather",
    "bind_reads",
    "bind_scatter",
    "staged_bytes",
]

STAGING_ALIGN_BYTES = 16
"""Every row of a staged run begins at a multiple of this."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows that are bound alike: ``[regions, 1, rows]``, regions with equally many rows.

    ``whole``: their tokens follow each other without a gap on both sides.
    """

    pair: GroupPair
    whole: bool
    src: Lines
    dst: Lines
    length_bytes: Int64s


@dataclass(frozen=True, slots=True)
class Reads:
    """The direct rows of one program from one source rank, laid over the memory of both ranks.

    All that does not depend on the handoff is done in `of`; keep it to bind many handoffs.
    """

    parts: tuple[_Part, ...]

    @classmethod
    def of(
        cls, rows: Int64s, pairs: Sequence[GroupPair], src: RegionTable, dst: RegionTable
    ) -> Reads:
        """Sort the rows into parts."""
        parts = []
        for pair, table in by_pair(rows, pairs):
            joined = SRC.joined(table) & DST.joined(table)
            for some, whole in ((table[joined], True), (table[~joined], False)):
                for alike in _by_region(some):
                    lines = Lines.of(alike, src, SRC), Lines.of(alike, dst, DST)
                    parts.append(_Part(pair, whole, *lines, alike[:, None, :, Column.COUNT]))
        return cls(tuple(parts))

    def bind(self, src_blocks: Blocks, dst_blocks: Blocks, tokens: Tokens) -> Descriptors:
        """The descriptors of one handoff.

        A row whose tokens follow each other without a gap on both sides becomes one descriptor for
        each stretch of tokens inside a page; any other row one for each token. They are in the
        order of region, page, place in the page, and those that continue each other on both sides,
        inside one region, are one. Raises `PageCountError` and `PageRangeError`.
        """
        tables = [np.empty((3, 0), np.int64)]
        for part in self.parts:
            pair = part.pair
            stretches = cut(pair, (SRC, DST), tokens, part.whole)
            src_pages = pages_of(pair, SRC, src_blocks, tokens)
            dst_pages = pages_of(pair, DST, dst_blocks, tokens)
            src_address = part.src.addresses(src_pages, pair.src, stretches)
            dst_address = part.dst.addresses(dst_pages, pair.dst, stretches)
            repeats = stretches.count if part.whole else np.ones_like(stretches.count)
            lengths = part.length_bytes * repeats[:, None]
            tables.append(merged(src_address, dst_address, lengths))
        return Descriptors(*np.concatenate(tables, axis=1))


def bind_reads(
    rows: Int64s,
    pairs: Sequence[GroupPair],
    src: RegionTable,
    dst: RegionTable,
    src_blocks: Blocks,
    dst_blocks: Blocks,
    tokens: Tokens,
) -> Descriptors:
    """Descriptors of direct rows that all have one source rank: `Reads`, used once."""
    return Reads.of(rows, pairs, src, dst).bind(src_blocks, dst_blocks, tokens)


def _by_region(rows: Int64s) -> Iterator[Int64s]:
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
    """Join what continues on both sides: ``[regions, ...]`` to ``[3, descriptors]``.

    Never from one region into the next: a READ must not leave the registration it begins in, even
    where two lie side by side.
    """
    src, dst, length = (a.reshape(len(a), -1) for a in (src_address, dst_address, lengths))
    begins = np.ones(src.shape, np.bool_)
    begins[:, 1:] = src[:, 1:] - src[:, :-1] != length[:, :-1]
    begins[:, 1:] |= dst[:, 1:] - dst[:, :-1] != length[:, :-1]
    table = np.array([src.ravel(), dst.ravel(), length.ravel()])
    first = np.flatnonzero(begins)
    if len(first) == begins.size:
        return table
    joined = table[:, first]
    joined[2] = np.add.reduceat(table[2], first)
    return joined


def staged_bytes(rows: Int64s, pairs: Sequence[GroupPair], tokens: Tokens) -> int:
    """Length of the run that ``rows`` are gathered into."""
    return int(_staging(rows, pairs, tokens)[1])


def bind_gather(
    rows: Int64s,
    pairs: Sequence[GroupPair],
    src: RegionTable,
    src_blocks: Blocks,
    tokens: Tokens,
    staging_address: int,
) -> Copies:
    """Copies from pages to the run at ``staging_address``: rows in order, tokens in order."""
    ends = _staged_ends(rows, pairs, src, src_blocks, tokens, staging_address, SRC)
    return Copies(tuple(grid(memory, staged, count) for memory, staged, count in ends))


def bind_scatter(
    rows: Int64s,
    pairs: Sequence[GroupPair],
    dst: RegionTable,
    dst_blocks: Blocks,
    tokens: Tokens,
    staging_address: int,
) -> Copies:
    """Copies from the run at ``staging_address`` to pages: the inverse of `bind_gather`."""
    ends = _staged_ends(rows, pairs, dst, dst_blocks, tokens, staging_address, DST)
    return Copies(tuple(grid(staged, memory, count) for memory, staged, count in ends))


def _staged_ends(
    rows: Int64s,
    pairs: Sequence[GroupPair],
    regions: RegionTable,
    blocks: Blocks,
    tokens: Tokens,
    staging_address: int,
    side: Side,
) -> Iterator[tuple[Ends, Ends, Int64s]]:
    """The ends of copies in memory and in the run, and counts: ``[rows, stretches]``.

    Row by row, as they lie in the run: kernels then walk through it from end to end.
    """
    begins, _ = _staging(rows, pairs, tokens)
    extended = np.column_stack([rows, begins, _wire_dtypes(rows)])
    for pair, table in by_pair(extended, pairs):
        pages = pages_of(pair, side, blocks, tokens)
        joined = side.joined(table)
        for part, whole in ((table[joined], True), (table[~joined], False)):
            if not len(part):
                continue
            begin, wire, count = (part[:, [i]] for i in (-2, -1, Column.COUNT))
            item = ITEM_BYTES[wire]
            stretches = cut(pair, (side,), tokens, whole)
            if not len(stretches.first):
                continue
            lines = Lines.of(part, regions, side)
            memory = lines.addresses(pages, side.form(pair), stretches).T
            first = pair.first_token(tokens.start, tokens.stop) if pair.per_token else 0
            staged = (stretches.first - first) * (count * item)
            staged += staging_address + begin
            yield (
                Ends(memory, part[:, [side.step]], part[:, [side.dtype]]),
                Ends(staged, item, wire),
                count * stretches.count if whole else count,
            )


def _staging(rows: Int64s, pairs: Sequence[GroupPair], tokens: Tokens) -> tuple[Int64s, int]:
    """Where each row begins in the run, and the run's length."""
    entries = [
        tokens.stop - pair.first_token(tokens.start, tokens.stop) if pair.per_token else 1
        for pair in pairs
    ]
    repeats = np.array(entries, np.int64)[rows[:, Column.GROUP_PAIR]]
    lengths = rows[:, Column.COUNT] * ITEM_BYTES[_wire_dtypes(rows)] * repeats
    lengths = -(-lengths // STAGING_ALIGN_BYTES) * STAGING_ALIGN_BYTES
    ends = np.cumsum(lengths)
    return ends - lengths, int(ends[-1]) if len(ends) else 0


def _wire_dtypes(rows: Int64s) -> Int64s:
    """The narrower type travels; both sides derive it from the row."""
    src, dst = rows[:, Column.SRC_DTYPE], rows[:, Column.DST_DTYPE]
    return np.where(ITEM_BYTES[dst] <= ITEM_BYTES[src], dst, src)
