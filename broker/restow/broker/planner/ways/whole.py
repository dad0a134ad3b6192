"""Whole: one READ for each span of a source page, out of which the destination takes its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from restow.broker.layout.rows import Bools, Int64s
from restow.broker.planner.cost_model import CostModel
from restow.broker.planner.costs import PricedRows, Seconds
from restow.broker.planner.program import SCATTER_SPANS, Column, GroupPair, Step
from restow.broker.planner.ways.spans import Spans, read_spans, span_pages
from restow.broker.planner.ways.way import Sent, Way, Work
from restow.broker.strategy import Strategy


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
