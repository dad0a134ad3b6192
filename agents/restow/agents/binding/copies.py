"""Bind a program's rows to the pages of one handoff: from rows to addresses, with numpy alone.

Law: element ``i`` of a row at token ``t`` lies at ``base + page * page_stride + offset +
(t % page_tokens) * token_stride + i * step`` on each side, where ``page`` is the one that holds
token ``t``. Nothing here loops over pages, tokens or rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from restow.agents.binding.addresses import (
    DST,
    SRC,
    Lines,
    Side,
    by_pair,
    cut,
    one_if_alike,
    pages_of,
)
from restow.agents.binding.pages import Blocks, RegionTable, Tokens
from restow.agents.binding.pieces import Copies, Ends, grid
from restow.broker.layout.rows import Int64s
from restow.broker.planner.program import Column, GroupPair
from restow.broker.planner.table import ITEM_BYTES

__all__ = [
    "STAGING_ALIGN_BYTES",
    "Blocks",
    "RegionTable",
    "Tokens",
    "bind_gather",
    "bind_scatter",
    "staged_bytes",
]

STAGING_ALIGN_BYTES = 16
"""Every row of a staged run begins at a multiple of this."""


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
            memory = lines.by_row(pages, side.form(pair), stretches)
            first = pair.first_token(tokens.start, tokens.stop) if pair.per_token else 0
            staged = (
                staging_address + begin + (stretches.first - first) * one_if_alike(count * item)
            )
            yield (
                Ends(memory, part[:, [side.step]], part[:, [side.dtype]]),
                Ends(staged, item, wire),
                count * one_if_alike(stretches.count) if whole else count,
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
