"""The direct ways: rows read into place, whole pages read and extracted, rows packed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from restow.broker.errors import StrategyRefusedError
from restow.broker.layout import DType
from restow.broker.layout.rows import Bools, Int64s
from restow.broker.layout.values import ITEM_BYTES
from restow.broker.planner.costs import CostModel, PricedRows, Seconds, descriptors, row_costs
from restow.broker.planner.program import (
    GATHER_IN_ORDER,
    READ_PAGES,
    READ_SPANS,
    SCATTER_SPANS,
    Column,
    GroupPair,
    Step,
    no_rows,
    split_rows,
)
from restow.broker.planner.way import Sent, Way, Work, src_ranks
from restow.broker.strategy import Strategy


@dataclass(frozen=True, slots=True)
class Sliced:
    """Rows that are read into place."""

    rows: Int64s

    strategy: ClassVar[Strategy] = Strategy.SLICES

    def steps(self, first_span: int) -> Sequence[Step]:
        """Return a READ for each run of bytes."""
        return (Step(READ_PAGES, split_rows(self.rows)),)

    def work(self, pairs: Sequence[GroupPair], tokens: int, costs: CostModel) -> Work:
        """Count a descriptor per piece."""
        rows = split_rows(self.rows)
        _, sizes = row_costs(rows, pairs, tokens)
        pieces = descriptors(rows, pairs, tokens).sum()
        return Work(bytes=int(sizes.sum()), reads=math.ceil(pieces.round(6)))


class Slices(Way):
    """Reads rows into place; cannot cast."""

    strategy = Strategy.SLICES

    def demanded(self, sent: Sent) -> Int64s | None:
        """Assign all rows. Raises `StrategyRefusedError` if a row changes its type."""
        casts = sent.priced.casts
        if casts.any():
            row = sent.table.rows[int(np.argmax(casts))]
            raise StrategyRefusedError(
                f"slices cannot convert {DType(row[Column.SRC_DTYPE]).label} to "
                f"{DType(row[Column.DST_DTYPE]).label}: use whole, pack or auto",
                strategy=self.strategy,
            )
        return super().demanded(sent)

    def seconds(self, priced: PricedRows) -> Seconds:
        """Return the cost of descriptors and bytes."""
        return np.where(priced.casts, np.inf, priced.into_place_s)

    def share(self, sent: Sent, mine: Bools) -> Sliced:
        """Return the rows unchanged."""
        return Sliced(sent.table.rows[mine])


SPAN_ALIGN_BYTES = 16
"""Alignment of spans, so that elements in staging are aligned to their size as in their page."""

_SAME_PAGE = [Column.SRC_RANK, Column.GROUP_PAIR, Column.SRC_REGION]


@dataclass(frozen=True, slots=True)
class Spans:
    """Spans (``table``, int64 ``[spans, len(Column)]``); row ``i`` lies in ``span_of[i]``."""

    table: Int64s
    span_of: Int64s

    @classmethod
    def of(cls, rows: Int64s, pairs: Sequence[GroupPair], max_gap_bytes: int | None) -> Spans:
        """Cover ``rows`` with spans; a gap of more than ``max_gap_bytes`` begins a new span.

        If ``max_gap_bytes`` is None, each region of a source rank has a single span.
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
        """Return the rows at their places in the spans, sorted by span."""
        if not len(rows):
            return no_rows()
        rows = rows.copy()
        rows[:, Column.SRC_REGION] = self.span_of
        rows[:, Column.SRC_OFFSET_BYTES] -= self.table[self.span_of, Column.SRC_OFFSET_BYTES]
        return rows[np.argsort(self.span_of, kind="stable")]


def span_rows(pages: Int64s, offset_bytes: Int64s, length_bytes: Int64s) -> Int64s:
    """Return rows that read stretches of ``pages``: source ranks, pairs of lists and regions.

    `read_spans` assigns the span that each row fills.
    """
    rows = np.zeros((len(pages), len(Column)), np.int64)
    rows[:, _SAME_PAGE] = pages
    rows[:, Column.SRC_OFFSET_BYTES] = offset_bytes
    rows[:, Column.COUNT] = length_bytes
    rows[:, [Column.SRC_STEP_BYTES, Column.DST_STEP_BYTES]] = 1
    rows[:, [Column.SRC_DTYPE, Column.DST_DTYPE]] = DType.UINT8
    return rows


def read_spans(rows: Int64s, first_span: int) -> Step:
    """Return the step that reads spans, numbered from ``first_span`` on."""
    rows = rows.copy()
    rows[:, Column.DST_REGION] = np.arange(first_span, first_span + len(rows))
    return Step(READ_SPANS, rows)


def span_pages(spans: Int64s, pairs: Sequence[GroupPair], tokens: int) -> Int64s:
    """Return how many source pages each span is read from for a prompt of ``tokens``."""
    counts = np.array([len(pair.src_pages(0, tokens)) for pair in pairs], np.int64)
    pages: Int64s = counts[spans[:, Column.GROUP_PAIR]]
    return pages


def _stops(rows: Int64s, pairs: Sequence[GroupPair]) -> Int64s:
    """Return the end of the last byte that each row touches in a page."""
    page_tokens = np.array([max(pair.src.page_tokens, 1) for pair in pairs], np.int64)
    tokens = page_tokens[rows[:, Column.GROUP_PAIR]]
    stops: Int64s = rows[:, Column.SRC_OFFSET_BYTES] + ITEM_BYTES[rows[:, Column.SRC_DTYPE]]
    stops += (tokens - 1) * rows[:, Column.SRC_TOKEN_STRIDE_BYTES]
    stops += (rows[:, Column.COUNT] - 1) * rows[:, Column.SRC_STEP_BYTES]
    return stops


def _reached(stop: Int64s, begins: Bools) -> Int64s:
    """Return the furthest ``stop`` so far within each page; ``begins`` marks first rows."""
    values, rank = np.unique(stop, return_inverse=True)
    page = (np.cumsum(begins) - 1) * len(values)
    reached: Int64s = values[np.maximum.accumulate(rank + page) - page]
    return reached


@dataclass(frozen=True, slots=True)
class Extracted:
    """Rows, and the spans that cover them."""

    rows: Int64s
    spans: Spans

    strategy: ClassVar[Strategy] = Strategy.WHOLE

    def steps(self, first_span: int) -> Sequence[Step]:
        """Return a step that reads spans, and a step that copies rows out of them."""
        extracted = self.spans.extracted(self.rows)
        extracted[:, Column.SRC_REGION] += first_span
        return read_spans(self.spans.table, first_span), Step(SCATTER_SPANS, extracted)

    def work(self, pairs: Sequence[GroupPair], tokens: int, costs: CostModel) -> Work:
        """Count a descriptor per page, and a copy at the destination."""
        table = self.spans.table
        pages = span_pages(table, pairs, tokens)
        return Work(
            bytes=int((pages * table[:, Column.COUNT]).sum()),
            reads=int(pages.sum()),
            launches=int(pages.any()),
            seconds=float(PricedRows(self.rows, pairs, tokens, costs).copy_s.sum()),
        )


class Whole(Way):
    """Reads whole spans with unneeded bytes, so that there are fewer reads."""

    strategy = Strategy.WHOLE

    def seconds(self, priced: PricedRows) -> Seconds:
        """Return the cost of a copy and a share of the span's read."""
        seconds = np.full(len(priced.rows), np.inf)
        # A piece is read into place if copying it costs more than its descriptor.
        small = priced.casts | (priced.into_place_s > priced.read_s + priced.copy_s)
        seconds[small] = priced.copy_s[small] + _shared(priced, small)
        return seconds

    def once_s(self, costs: CostModel) -> float:
        """Return the cost of a launch at the destination."""
        return costs.seconds_per_launch

    def share(self, sent: Sent, mine: Bools) -> Extracted:
        """Cover rows by spans without long gaps; if requested as strategy, by a span per region."""
        rows, costs = sent.table.rows[mine], sent.priced.costs
        gap_bytes = None if sent.strategy is self.strategy else costs.gap_bytes
        return Extracted(rows, Spans.of(rows, sent.priced.pairs, gap_bytes))


def _shared(priced: PricedRows, small: Bools) -> Seconds:
    """Return each row's share of its span's read, proportional to the row's cost on its own.

    So all rows of a span gain or lose together.
    """
    costs, weights = priced.costs, priced.into_place_s[small]
    spans = Spans.of(priced.rows[small], priced.pairs, costs.gap_bytes)
    pages = span_pages(spans.table, priced.pairs, priced.tokens)
    lengths = spans.table[:, Column.COUNT]
    seconds = costs.seconds_per_descriptor + lengths / costs.read_bytes_per_second
    total = np.bincount(spans.span_of, weights, minlength=len(spans.table))
    # A row costs nothing if none of its tokens moves in this prompt.
    per_weight = np.divide(pages * seconds, total, out=np.zeros(len(total)), where=total > 0)
    shares: Seconds = weights * per_weight[spans.span_of]
    return shares


@dataclass(frozen=True, slots=True)
class Packed:
    """Rows that are gathered and scattered."""

    rows: Int64s

    strategy: ClassVar[Strategy] = Strategy.PACK

    def steps(self, first_span: int) -> Sequence[Step]:
        """Return a step that gathers row after row into the run."""
        return (Step(GATHER_IN_ORDER, self.rows),)

    def work(self, pairs: Sequence[GroupPair], tokens: int, costs: CostModel) -> Work:
        """Count a copy on both sides."""
        priced = PricedRows(self.rows, pairs, tokens, costs)
        return Work(
            bytes=int(priced.wire_bytes.sum()),
            # A rank that holds none of the tokens is not asked to gather.
            gathering=src_ranks(self.rows[priced.wire_bytes > 0]),
            seconds=2 * float(priced.packing_s.sum()),
        )


class Pack(Way):
    """Sends exactly the needed bytes, whatever their form."""

    strategy = Strategy.PACK

    def seconds(self, priced: PricedRows) -> Seconds:
        """Return the cost of the bytes sent and of two copies."""
        sent_s: Seconds = priced.wire_bytes / priced.costs.read_bytes_per_second
        return sent_s + 2 * priced.packing_s

    def once_s(self, costs: CostModel) -> float:
        """Return the cost of a request to the source and a launch on both sides."""
        return costs.seconds_per_stage + 2 * costs.seconds_per_launch

    def share(self, sent: Sent, mine: Bools) -> Packed:
        """Return the rows unchanged."""
        return Packed(sent.table.rows[mine])
