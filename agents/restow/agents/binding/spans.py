"""Bind the spans of a program: which pages are read into staging whole.

A span's pages lie in staging one after the other, those of all spans one span after the other. So
staging is memory with regions and pages like any other: span ``i`` is region ``i``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from restow.agents.binding.addresses import SRC, pages_of
from restow.agents.binding.copies import STAGING_ALIGN_BYTES
from restow.agents.binding.pages import Blocks, RegionTable, Tokens, check_pages
from restow.agents.binding.pieces import Descriptors
from restow.agents.binding.reads import merged
from restow.broker.layout.rows import Bools, Int64s
from restow.broker.planner.program import Column, GroupPair


@dataclass(frozen=True, slots=True)
class StagedSpans:
    """How the spans of one program lie in staging, tokens left open: ``stride_bytes`` ``[spans]``.

    ``pair`` is each span's index in ``pairs``.
    """

    pairs: tuple[GroupPair, ...]
    pair: Int64s
    stride_bytes: Int64s
    fixed: tuple[RegionTable, int] | None
    """What `at` finds at address 0, where no tokens change it: all are spans of snapshots."""

    @classmethod
    def of(cls, spans: Int64s, pairs: Sequence[GroupPair]) -> StagedSpans:
        """Those of ``spans`` ``[spans, len(SpanColumn)]``."""
        lengths = spans[:, Column.COUNT]
        stride = -(-lengths // STAGING_ALIGN_BYTES) * STAGING_ALIGN_BYTES
        pair = spans[:, Column.GROUP_PAIR]
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
        if not len(self.pair):
            return RegionTable(self.pair, self.stride_bytes, self.pair), 0
        counts = [len(pair.src_pages(tokens.start, tokens.stop)) for pair in self.pairs]
        pages = np.array(counts, np.int64)[self.pair]
        lengths = pages * self.stride_bytes
        ends = np.cumsum(lengths)
        base = ends - lengths + staging_address
        return RegionTable(base, self.stride_bytes, pages), int(ends[-1])


@dataclass(frozen=True, slots=True)
class _Part:
    """The spans of one pair of page lists: arrays ``[spans]``, ``index`` that of each span."""

    pair: GroupPair
    index: Int64s
    first_address: Int64s
    page_stride_bytes: Int64s
    length_bytes: Int64s
    page_count: int


@dataclass(frozen=True, slots=True)
class SpanReads:
    """Spans that have one source rank, laid over its memory; keep it to bind many handoffs."""

    parts: tuple[_Part, ...]

    @classmethod
    def of(
        cls, spans: Int64s, chosen: Bools, pairs: Sequence[GroupPair], src: RegionTable
    ) -> SpanReads:
        """Of the ``chosen`` ones."""
        parts = []
        for number, pair in enumerate(pairs):
            index = np.flatnonzero(chosen & (spans[:, Column.GROUP_PAIR] == number))
            if not len(index):
                continue
            table = spans[index]
            region = table[:, Column.SRC_REGION]
            parts.append(
                _Part(
                    pair,
                    index,
                    src.base_address[region] + table[:, Column.SRC_OFFSET_BYTES],
                    src.page_stride_bytes[region],
                    table[:, Column.COUNT],
                    int(src.page_count[region].min()),
                )
            )
        return cls(tuple(parts))

    def bind(self, staged: RegionTable, src_blocks: Blocks, tokens: Tokens) -> Descriptors:
        """The descriptors of one handoff. Raises `PageCountError` and `PageRangeError`."""
        tables = [np.empty((3, 0), np.int64)]
        for part in self.parts:
            held = part.pair.src_pages(tokens.start, tokens.stop)
            if not len(held):
                continue
            pages = pages_of(part.pair, SRC, src_blocks, tokens)[held.start : held.stop]
            check_pages(pages, part.page_count, SRC.name)
            there = part.first_address[:, None] + part.page_stride_bytes[:, None] * pages
            here = staged.base_address[part.index][:, None]
            if len(held) == 1:
                tables.append(np.array([there.ravel(), here.ravel(), part.length_bytes]))
                continue
            here = here + staged.page_stride_bytes[part.index][:, None] * np.arange(len(held))
            lengths = np.broadcast_to(part.length_bytes[:, None], there.shape)
            tables.append(merged(there, here, lengths))
        return Descriptors(*np.concatenate(tables, axis=1))
