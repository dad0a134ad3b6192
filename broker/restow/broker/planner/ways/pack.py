"""Pack: the source gathers into one run, which is one READ, and the destination scatters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from restow.broker.layout.rows import Bools, Int64s
from restow.broker.planner.cost_model import CostModel
from restow.broker.planner.costs import PricedRows, Seconds
from restow.broker.planner.program import GATHER_IN_ORDER, GroupPair, Step
from restow.broker.planner.ways.way import Sent, Way, Work, src_ranks
from restow.broker.strategy import Strategy


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
