"""Compile a plan: one program for each destination rank, its rows dealt out to the ways."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from restow.broker.layout import RankLayout
from restow.broker.layout.rows import Int64s
from restow.broker.planner.choice import choose_ways
from restow.broker.planner.clearing import ColdRows, cleared_rows
from restow.broker.planner.cost_model import CostModel
from restow.broker.planner.costs import PricedRows
from restow.broker.planner.draft import Draft
from restow.broker.planner.estimate import estimate
from restow.broker.planner.move import Move
from restow.broker.planner.plan import Plan
from restow.broker.planner.program import (
    CLEAR_PAGES,
    READ_SPANS,
    GroupPair,
    Program,
    Step,
    joined_steps,
    no_rows,
)
from restow.broker.planner.table import Cutter
from restow.broker.planner.ways import WAYS
from restow.broker.planner.ways.way import Sent, Share, Spared
from restow.broker.strategy import Strategy
from restow.broker.words import member


def compile_programs(
    plan: Plan, strategy: Strategy = Strategy.AUTO, costs: CostModel | None = None
) -> tuple[Program, ...]:
    """One program for each destination rank, in their order.

    Raises `StrategyRefusedError` where a strategy can't serve the plan.
    """
    pairs, drafts = draft_programs(plan, strategy, costs)
    return tuple(_program(draft, pairs) for draft in drafts)


def draft_programs(
    plan: Plan, strategy: Strategy = Strategy.AUTO, costs: CostModel | None = None
) -> tuple[tuple[GroupPair, ...], list[Draft]]:
    """The pairs of page lists and the drafts of all programs. Raises as `compile_programs`."""
    strategy = member(Strategy, strategy, "strategy")
    drafting = _Drafting(plan, strategy, costs or CostModel())
    by_rank: dict[int, list[Move]] = defaultdict(list)
    for move in plan.moves:
        by_rank[move.dst_rank].append(move)
    drafts = [drafting.draft(rank, tuple(by_rank[rank.rank])) for rank in plan.destination.ranks]
    if not plan.cold:
        return drafting.cutter.pairs, drafts
    cold = ColdRows(plan, len(drafting.cutter.pairs))  # the ways may have added pairs
    pairs = (*drafting.cutter.pairs, *cold.pairs)
    return pairs, [
        replace(draft, cleared=_cleared(rank, pairs, cold.rows(rank), bool(by_rank[rank.rank])))
        for draft, rank in zip(drafts, plan.destination.ranks, strict=True)
    ]


def _cleared(rank: RankLayout, pairs: Sequence[GroupPair], cold: Int64s, moves: bool) -> Int64s:
    """What is zeroed: scratch memory if anything arrives, and what begins cold."""
    scratch = cleared_rows(rank, pairs) if moves or len(cold) else no_rows()
    return np.concatenate([scratch, cold])


class _Drafting:
    """Drafts the programs of one plan."""

    def __init__(self, plan: Plan, strategy: Strategy, costs: CostModel) -> None:
        """Prepare. Raises as `Way.sparing`."""
        self.cutter = Cutter(plan)
        self._strategy, self._costs = strategy, costs
        self._readers = Counter(src for src, _ in {(m.src_rank, m.dst_rank) for m in plan.moves})
        """How many destination ranks read from each source rank."""
        found = (way.sparing(plan, strategy) for way in WAYS)
        self._sparing = [sparing for sparing in found if sparing is not None]

    def draft(self, rank: RankLayout, moves: tuple[Move, ...]) -> Draft:
        """The draft of one rank's program; moves are spared where that is asked for, or pays."""
        spared = [sparing(rank, self.cutter) for sparing in self._sparing]
        if self._strategy is not Strategy.AUTO:
            return self._draft(rank, moves, spared)
        before, kept = self.cutter.pieces, list[Spared]()
        best = self._draft(rank, moves, kept)
        for one in spared:
            least_s, counted = self._seconds(best.shares), self.cutter.pieces
            if not one.moves or self._seconds([one]) >= least_s:
                continue
            self.cutter.pieces = before
            made = self._draft(rank, moves, [*kept, one])
            self.cutter.pieces = counted  # one of the two is dropped
            if self._seconds(made.shares) < least_s:
                best, kept = made, [*kept, one]
        return best

    def _seconds(self, shares: Sequence[Share]) -> float:
        costs = self._costs
        return estimate(shares, self.cutter.pairs, costs.nominal_tokens, costs).seconds

    def _draft(self, rank: RankLayout, moves: tuple[Move, ...], spared: Sequence[Spared]) -> Draft:
        cutter, costs = self.cutter, self._costs
        kept = _unspared(moves, spared)
        table = cutter.table(kept)
        priced = PricedRows(table.rows, cutter.pairs, costs.nominal_tokens, costs)
        sent = Sent(self._strategy, kept, table, priced, cutter, self._readers)
        ways = choose_ways(sent)
        shares = (way.share(sent, ways == way.strategy.number) for way in WAYS)
        return Draft(
            rank.rank,
            kept,
            table,
            ways,
            (*(share for share in shares if share is not None), *spared),
            _cleared(rank, cutter.pairs, no_rows(), bool(moves)),
        )


def _unspared(moves: tuple[Move, ...], spared: Sequence[Spared]) -> tuple[Move, ...]:
    """The moves that remain."""
    gone = {(move.field, move.box) for one in spared for move in one.moves}
    kept = (move for move in moves if (move.field, move.box) not in gone)
    return tuple(kept) if gone else moves


def _program(draft: Draft, pairs: tuple[GroupPair, ...]) -> Program:
    found, used, first_span = [Step(CLEAR_PAGES, draft.cleared)], [], 0
    for share in draft.shares:
        mine = [step for step in share.steps(first_span) if len(step.rows)]
        first_span += sum(len(step.rows) for step in mine if step.form == READ_SPANS)
        found += mine
        used += [share.strategy] * bool(mine)
    steps = joined_steps(found)
    shapes = [(step.form, step.rows.shape) for step in steps]
    content = hashlib.sha256(repr((draft.dst_rank, pairs, shapes)).encode())
    for step in steps:
        content.update(step.rows.astype("<i8").tobytes())
    return Program(content.hexdigest()[:32], draft.dst_rank, pairs, steps, tuple(used))
