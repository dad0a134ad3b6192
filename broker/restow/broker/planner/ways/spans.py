"""Spans of source pages that are read as they are: from the first to the last byte that is needed.

One descriptor a page then stands for many, and costs the bytes between, which nobody needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from restow.broker.layout import DType
from restow.broker.layout.dtype import ITEM_BYTES
from restow.broker.layout.rows import Bools, Int64s
from restow.broker.planner.program import READ_SPANS, Column, GroupPair, Step, no_rows

SPAN_ALIGN_BYTES = 16
"""Every span begins at a multiple of this, so that elements in staging lie at multiples of their
size as they do in their page."""

_SAME_PAGE = [Column.SRC_RANK, Column.GROUP_PAIR, Column.SRC_REGION]


@dataclass(frozen=True, slots=True)
class Spans:
    """``table`` is int64 ``[spans, len(Column)]``; row ``i`` lies in span ``span_of[i]``."""

    table: Int64s
    span_of: Int64s

    @classmethod
    def of(cls, rows: Int64s, pairs: Sequence[GroupPair], max_gap_bytes: int | None) -> Spans:
        """Cover ``rows``; more than ``max_gap_bytes`` between two of them begin a new span.

        Without that there is one span for each region of a source rank.
        """
        if not len(rows):
            return cls(no_rows(), np.zeros(0, np.int64))
        order = np.lexsort((rows[:, Column.SRC_OFFSET_BYTES], *rows[:, _SAME_PAGE].T[::-1]))
        rows = rows[order]
        start = rows[:, Column.SRC_OFFSET_BYTES] // SPAN_ALIGN_BYTES * SPAN_ALIGN_BYTES
        stop = _stops(rows, pairs)
        begins = np.ones(len(rows), np.bool_)
        begins[1:] = (rows[1:, _SAME_PAGE] != rows[:-1, _SAME_PAGE]).any(axis=1)
        if max_gap_bytes is not None:
            begins[1:] |= start[1:] - _reached(stop, begins)[:-1] > max_gap_bytes
        first = np.flatnonzero(begins)
        length = np.maximum.reduceat(stop, first) - start[first]
        span_of = np.empty(len(rows), np.int64)
        span_of[order] = np.cumsum(begins) - 1
        return cls(span_rows(rows[first][:, _SAME_PAGE], start[first], length), span_of)

    def extracted(self, rows: Int64s) -> Int64s:
        """The rows as they lie in their spans, those of one span together."""
        if not len(rows):
            return no_rows()
        rows = rows.copy()
        rows[:, Column.SRC_REGION] = self.span_of
        rows[:, Column.SRC_OFFSET_BYTES] -= self.table[self.span_of, Column.SRC_OFFSET_BYTES]
        return rows[np.argsort(self.span_of, kind="stable")]


def span_rows(pages: Int64s, offset_bytes: Int64s, length_bytes: Int64s) -> Int64s:
    """Rows that read a stretch of pages; ``pages`` are source ranks, pairs of lists and regions.

    Which span each fills is left open: `read_spans` numbers them.
    """
    rows = np.zeros((len(pages), len(Column)), np.int64)
    rows[:, _SAME_PAGE] = pages
    rows[:, Column.SRC_OFFSET_BYTES] = offset_bytes
    rows[:, Column.COUNT] = length_bytes
    rows[:, [Column.SRC_STEP_BYTES, Column.DST_STEP_BYTES]] = 1
    rows[:, [Column.SRC_DTYPE, Column.DST_DTYPE]] = DType.UINT8
    return rows


def read_spans(rows: Int64s, first_span: int) -> Step:
    """The step that reads them, numbered from ``first_span`` on."""
    rows = rows.copy()
    rows[:, Column.DST_REGION] = np.arange(first_span, first_span + len(rows))
    return Step(READ_SPANS, rows)


def span_pages(spans: Int64s, pairs: Sequence[GroupPair], tokens: int) -> Int64s:
    """How many source pages each span is read from for a prompt of ``tokens``."""
    counts = np.array([len(pair.src_pages(0, tokens)) for pair in pairs], np.int64)
    pages: Int64s = counts[spans[:, Column.GROUP_PAIR]]
    return pages


def _stops(rows: Int64s, pairs: Sequence[GroupPair]) -> Int64s:
    """One past the last byte that each row touches in a page."""
    page_tokens = np.array([max(pair.src.page_tokens, 1) for pair in pairs], np.int64)
    tokens = page_tokens[rows[:, Column.GROUP_PAIR]]
    stops: Int64s = rows[:, Column.SRC_OFFSET_BYTES] + ITEM_BYTES[rows[:, Column.SRC_DTYPE]]
    stops += (tokens - 1) * rows[:, Column.SRC_TOKEN_STRIDE_BYTES]
    stops += (rows[:, Column.COUNT] - 1) * rows[:, Column.SRC_STEP_BYTES]
    return stops


def _reached(stop: Int64s, begins: Bools) -> Int64s:
    """The furthest ``stop`` so far, counted anew wherever a page ``begins``."""
    values, rank = np.unique(stop, return_inverse=True)
    page = (np.cumsum(begins) - 1) * len(values)
    reached: Int64s = values[np.maximum.accumulate(rank + page) - page]
    return reached
