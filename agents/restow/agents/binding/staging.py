"""How a run of staging is laid out: rows one behind the other, or spans with all their pages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from restow.agents.binding.pages import RegionTable, Tokens
from restow.broker.layout.dtype import ITEM_BYTES
from restow.broker.layout.rows import Int64s
from restow.broker.planner.program import Column, GroupPair, moved_tokens

STAGING_ALIGN_BYTES = 16
"""Every row of a run, and every page of a span, begins at a multiple of this."""


def staged_bytes(rows: Int64s, pairs: Sequence[GroupPair], tokens: Tokens) -> int:
    """Length of the run that ``rows`` are gathered into."""
    return row_begins(rows, pairs, tokens)[1]


def row_begins(rows: Int64s, pairs: Sequence[GroupPair], tokens: Tokens) -> tuple[Int64s, int]:
    """Where each row begins in the run, and the run's length."""
    entries = [
        moved_tokens(pair, tokens.start, tokens.stop) if pair.per_token else 1 for pair in pairs
    ]
    repeats = np.array(entries, np.int64)[rows[:, Column.GROUP_PAIR]]
    lengths = rows[:, Column.COUNT] * ITEM_BYTES[wire_dtypes(rows)] * repeats
    return _behind(_aligned(lengths))


def wire_dtypes(rows: Int64s) -> Int64s:
    """The narrower type travels; both sides derive it from the row."""
    src, dst = rows[..., Column.SRC_DTYPE], rows[..., Column.DST_DTYPE]
    return np.where(ITEM_BYTES[dst] <= ITEM_BYTES[src], dst, src)


NO_REGIONS = RegionTable(*(np.empty(0, np.int64) for _ in range(3)))


def staged_spans(
    spans: Int64s, pairs: Sequence[GroupPair], tokens: Tokens, staging_address: int = 0
) -> tuple[RegionTable, int]:
    """How spans lie in a run at ``staging_address``, and the length of that run.

    A span's pages lie one after the other, those of all spans one span after the other. So staging
    is memory with regions and pages like any other: span ``i`` is region ``i``.
    """
    if not len(spans):  # as of most programs
        return NO_REGIONS, 0
    counts = [len(pair.src_pages(tokens.start, tokens.stop)) for pair in pairs]
    pages = np.array(counts, np.int64)[spans[:, Column.GROUP_PAIR]]
    strides = _aligned(spans[:, Column.COUNT])
    begins, length = _behind(pages * strides)
    return RegionTable(begins + staging_address, strides, pages), length


def _behind(length_bytes: Int64s) -> tuple[Int64s, int]:
    """Where each begins if all lie one behind the other, and where the last one ends."""
    ends = np.cumsum(length_bytes)
    return ends - length_bytes, int(ends[-1]) if len(ends) else 0


def _aligned(length_bytes: Int64s) -> Int64s:
    return -(-length_bytes // STAGING_ALIGN_BYTES) * STAGING_ALIGN_BYTES
