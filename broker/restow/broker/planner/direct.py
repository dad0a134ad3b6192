"""The plain ways to travel: rows read into place, whole pages read as they are, rows packed."""

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
)
from restow.broker.planner.program.programs import split_rows
from restow.broker.planner.way import Sent, Way, Work, src_ranks
from restow.broker.strategy import Strategy


@dataclass(frozen=True, slots=True)
class Sliced:
    """Rows that are read into place."""

    rows: Int64s

    strategy: ClassVar[Strategy] = Strategy.SLICES

    def steps(self, first_span: int) -> Sequence[Step]:
        """A read for each run of bytes."""
        return (Step(READ_PAGES, split_rows(self.rows)),)

    def work(self, pairs: Sequence[GroupPair], tokens: int, costs: CostModel) -> Work:
        """A descriptor a piece."""
        rows = split_rows(self.rows)
        _, sizes = row_costs(rows, pairs, tokens)
        pieces = descriptors(rows, pairs, tokens).sum()
        return Work(bytes=int(sizes.sum()), reads=math.ceil(pieces.round(6)))


class Slices(Way):
    """Reads rows into place; casts none."""

    strategy = Strategy.SLICES

    def demanded(self, sent: Sent) -> Int64s | None:
        """All rows. Raises `StrategyRefusedError` where a type would have to change."""
        casts = sent.priced.casts
        if casts.any():
            row = sent.table.rows[int(np.argmax(casts))]
            raise StrategyRefusedError(
                f"slices can't turn {DType(row[Column.SRC_DTYPE]).label} into "
                f"{DType(row[Column.DST_DTYPE]).label}: use whole, pack or auto",
                strategy=self.strategy,
            )
        return super().demanded(sent)

    def seconds(self, priced: PricedRows) -> Seconds:
        """Descriptors and bytes."""
        return np.where(priced.casts, np.inf, priced.into_place_s)

    def share(self, sent: Sent, mine: Bools) -> Sliced:
        """The rows as they are."""
        return Sliced(sent.table.rows[mine])


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


@dataclass(frozen=True, slots=True)
class Extracted:
    """Rows, and the spans that cover them."""

    rows: Int64s
    spans: Spans

    strategy: ClassVar[Strategy] = Strategy.WHOLE

    def steps(self, first_span: int) -> Sequence[Step]:
        """Spans are read, and rows are copied out of them."""
        extracted = self.spans.extracted(self.rows)
        extracted[:, Column.SRC_REGION] += first_span
        return read_spans(self.spans.table, first_span), Step(SCATTER_SPANS, extracted)

    def work(self, pairs: Sequence[GroupPair], tokens: int, costs: CostModel) -> Work:
        """A descriptor a page, and a copy at the destination."""
        table = self.spans.table
        pages = span_pages(table, pairs, tokens)
        return Work(
            bytes=int((pages * table[:, Column.COUNT]).sum()),
            reads=int(pages.sum()),
            launches=int(pages.any()),
            seconds=float(PricedRows(self.rows, pairs, tokens, costs).copy_s.sum()),
        )


class Whole(Way):
    """Reads more than is needed, to read less often."""

    strategy = Strategy.WHOLE

    def seconds(self, priced: PricedRows) -> Seconds:
        """A copy, and a share of the reading of the span."""
        seconds = np.full(len(priced.rows), np.inf)
        # A piece so large that copying it once costs more than its descriptor is read in place.
        small = priced.casts | (priced.into_place_s > priced.read_s + priced.copy_s)
        seconds[small] = priced.copy_s[small] + _shared(priced, small)
        return seconds

    def once_s(self, costs: CostModel) -> float:
        """A launch at the destination."""
        return costs.seconds_per_launch

    def share(self, sent: Sent, mine: Bools) -> Extracted:
        """The rows, in spans without long gaps; when asked for, one span for each region."""
        rows, costs = sent.table.rows[mine], sent.priced.costs
        gap_bytes = None if sent.strategy is self.strategy else costs.gap_bytes
        return Extracted(rows, Spans.of(rows, sent.priced.pairs, gap_bytes))


def _shared(priced: PricedRows, small: Bools) -> Seconds:
    """Each row's share of the reading of its span, in proportion to what it costs by itself.

    So all rows of a span gain or lose alike by it.
    """
    costs, weights = priced.costs, priced.into_place_s[small]
    spans = Spans.of(priced.rows[small], priced.pairs, costs.gap_bytes)
    pages = span_pages(spans.table, priced.pairs, priced.tokens)
    lengths = spans.table[:, Column.COUNT]
    seconds = costs.seconds_per_descriptor + lengths / costs.read_bytes_per_second
    total = np.bincount(spans.span_of, weights, minlength=len(spans.table))
    # A row of which so few tokens move that none does in this prompt costs nothing.
    per_weight = np.divide(pages * seconds, total, out=np.zeros(len(total)), where=total > 0)
    shares: Seconds = weights * per_weight[spans.span_of]
    return shares


@dataclass(frozen=True, slots=True)
class Packed:
    """Rows that are gathered and scattered."""

    rows: Int64s

    strategy: ClassVar[Strategy] = Strategy.PACK

    def steps(self, first_span: int) -> Sequence[Step]:
        """The source copies row after row into the run, the destination out of it."""
        return (Step(GATHER_IN_ORDER, self.rows),)

    def work(self, pairs: Sequence[GroupPair], tokens: int, costs: CostModel) -> Work:
        """A copy on both sides."""
        priced = PricedRows(self.rows, pairs, tokens, costs)
        return Work(
            bytes=int(priced.wire_bytes.sum()),
            # Of a rank that holds none of the tokens nothing is asked.
            gathering=src_ranks(self.rows[priced.wire_bytes > 0]),
            seconds=2 * float(priced.packing_s.sum()),
        )


class Pack(Way):
    """Sends what is needed and no more, whatever it looks like."""

    strategy = Strategy.PACK

    def seconds(self, priced: PricedRows) -> Seconds:
        """The bytes that travel, and two copies."""
        sent_s: Seconds = priced.wire_bytes / priced.costs.read_bytes_per_second
        return sent_s + 2 * priced.packing_s

    def once_s(self, costs: CostModel) -> float:
        """Asking a source, and a launch on both sides."""
        return costs.seconds_per_stage + 2 * costs.seconds_per_launch

    def share(self, sent: Sent, mine: Bools) -> Packed:
        """The rows as they are."""
        return Packed(sent.table.rows[mine])
