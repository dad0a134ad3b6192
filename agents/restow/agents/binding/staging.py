"""How a run of staging is laid out: rows one behind the other, or spans with all their pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from restow.agents.binding.pages import RegionTable, Tokens
from restow.broker.layout.dtype import ITEM_BYTES
from restow.broker.layout.rows import Int64s
from restow.broker.planner.program import Column, GroupPair

STAGING_ALIGN_BYTES = 16
"""Every row of a run, and every page of a span, begins at a multiple of this."""


def staged_bytes(rows: Int64s, pairs: Sequence[GroupPair], tokens: Tokens) -> int:
    """Length of the run that ``rows`` are gathered into."""
    return row_begins(rows, pairs, tokens)[1]


def row_begins(rows: Int64s, pairs: Sequence[GroupPair], tokens: Tokens) -> tuple[Int64s, int]:
    """Where each row begins in the run, and the run's length."""
    entries = [
        tokens.stop - pair.first_token(tokens.start, tokens.stop) if pair.per_token else 1
        for pair in pairs
    ]
    repeats = np.array(entries, np.int64)[rows[:, Column.GROUP_PAIR]]
    lengths = rows[:, Column.COUNT] * ITEM_BYTES[wire_dtypes(rows)] * repeats
    return _behind(_aligned(lengths))


def wire_dtypes(rows: Int64s) -> Int64s:
    """The narrower type travels; both sides derive it from the row."""
    src, dst = rows[..., Column.SRC_DTYPE], rows[..., Column.DST_DTYPE]
    return np.where(ITEM_BYTES[dst] <= ITEM_BYTES[src], dst, src)


@dataclass(frozen=True, slots=True)
class StagedSpans:
    """How the spans of one program lie in staging, tokens left open: ``stride_bytes`` ``[spans]``.

    A span's pages lie one after the other, those of all spans one span after the other. So staging
    is memory with regions and pages like any other: span ``i`` is region ``i``. ``pair`` is each
    span's index in ``pairs``.
    """

    pairs: tuple[GroupPair, ...]
    pair: Int64s
    stride_bytes: Int64s
    fixed: tuple[RegionTable, int] | None
    """What `at` finds at address 0, where no tokens change it: all are spans of snapshots."""

    @classmethod
    def of(cls, spans: Int64s, pairs: Sequence[GroupPair]) -> StagedSpans:
        """Those of ``spans`` ``[spans, len(Column)]``."""
        pair = spans[:, Column.GROUP_PAIR]
        stride = _aligned(spans[:, Column.COUNT])
        open_spans = cls(tuple(pairs), pair, stride, None)
        if any(pairs[number].per_token for number in np.unique(pair)):
            return open_spans
        return replace(open_spans, fixed=open_spans.at(Tokens(0, 1), 0))

    def at(self, tokens: Tokens, staging_address: int) -> tuple[RegionTable, int]:
        """The spans as regions of a run at ``staging_address``, and the length of that run."""
        if self.fixed is not None:
            table, length = self.fixed
            base = table.base_address + staging_address
            return RegionTable(base, table.page_stride_bytes, table.page_count), length
        counts = [len(pair.src_pages(tokens.start, tokens.stop)) for pair in self.pairs]
        pages = np.array(counts, np.int64)[self.pair]
        begins, length = _behind(pages * self.stride_bytes)
        return RegionTable(begins + staging_address, self.stride_bytes, pages), length


def _behind(length_bytes: Int64s) -> tuple[Int64s, int]:
    """Where each begins if all lie one behind the other, and where the last one ends."""
    ends = np.cumsum(length_bytes)
    return ends - length_bytes, int(ends[-1]) if len(ends) else 0


def _aligned(length_bytes: Int64s) -> Int64s:
    return -(-length_bytes // STAGING_ALIGN_BYTES) * STAGING_ALIGN_BYTES
