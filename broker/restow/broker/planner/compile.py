"""Compile a plan: one program for each destination rank, its rows dealt out to the ways."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from restow.broker.layout import RankLayout
from restow.broker.layout.rows import Int64s
from restow.broker.planner.choice import choose_ways, interleaves, snapshots
from restow.broker.planner.clearing import cleared_rows
from restow.broker.planner.cost_model import CostModel
from restow.broker.planner.draft import Draft
from restow.broker.planner.estimate import estimate
from restow.broker.planner.interleave import Chunks, whole_moves
from restow.broker.planner.move import Move
from restow.broker.planner.plan import Plan
from restow.broker.planner.program import GroupPair, Program, ProjectColumn, no_rows
from restow.broker.planner.recompute import Rebuilt, recompute_of
from restow.broker.planner.spans import Spans
from restow.broker.planner.strategy import CHOOSING, WAYS, Strategy
from restow.broker.planner.table import Cutter, Table, split_rows
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
    return drafting.cutter.pairs, drafts


class _Drafting:
    """Drafts the programs of one plan."""

    def __init__(self, plan: Plan, strategy: Strategy, costs: CostModel) -> None:
        """Prepare. Raises as `recompute_of`."""
        self.cutter = Cutter(plan)
        self._strategy, self._costs = strategy, costs
        self._readers = Counter(src for src, _ in {(m.src_rank, m.dst_rank) for m in plan.moves})
        """How many destination ranks read from each source rank."""
        self._recompute = recompute_of(plan, strategy)

    def draft(self, rank: RankLayout, moves: tuple[Move, ...]) -> Draft:
        """The draft of one rank's program: with what it can rebuild, if that is to be or pays."""
        if self._recompute is None:
            return self._draft(rank, moves, Rebuilt())
        rebuilt = self._recompute.rebuilt(rank, self.cutter)
        if self._strategy is Strategy.RECOMPUTE:
            return self._draft(rank, moves, rebuilt)
        before = self.cutter.pieces
        sent = self._draft(rank, moves, Rebuilt())
        sent_s = self._seconds(sent)
        weights_s = rebuilt.weight_bytes * self._costs.seconds_per_weight_byte
        if not rebuilt.moves or weights_s >= sent_s:
            return sent
        counted, self.cutter.pieces = self.cutter.pieces, before
        made = self._draft(rank, moves, rebuilt)
        self.cutter.pieces = counted  # one of the two is dropped
        return made if self._seconds(made) < sent_s else sent

    def _seconds(self, draft: Draft) -> float:
        costs = self._costs
        return estimate(draft, self.cutter.pairs, costs.nominal_tokens, costs).seconds

    def _draft(self, rank: RankLayout, moves: tuple[Move, ...], rebuilt: Rebuilt) -> Draft:
        cutter, strategy, costs = self.cutter, self._strategy, self._costs
        sent = rebuilt.without(moves)
        table = cutter.table(sent)
        ways = choose_ways(table.rows, cutter.pairs, strategy, costs)
        if strategy in CHOOSING:
            self._interleave_packed(sent, table, ways)
        mixed = ways[table.piece_row] == WAYS.index(Strategy.INTERLEAVE)
        through = [sent[index] for index in np.unique(table.piece_move[mixed]).tolist()]
        whole = table.rows[ways == WAYS.index(Strategy.WHOLE)]
        gap_bytes = None if strategy is Strategy.WHOLE else costs.gap_bytes
        return Draft(
            rank.rank,
            sent,
            table,
            ways,
            Spans.of(whole, cutter.pairs, gap_bytes),
            Chunks.of(through, cutter),
            cleared_rows(rank, cutter.pairs) if moves else no_rows(),
            rebuilt,
        )

    def _interleave_packed(self, moves: Sequence[Move], table: Table, ways: Int64s) -> None:
        """Have states that were to be packed for one reader after the other permuted for all.

        Changes ``ways``, where that costs less.
        """
        pairs = self.cutter.pairs
        candidates = ways == WAYS.index(Strategy.PACK)
        candidates &= snapshots(table.rows, pairs)
        if not candidates.any():
            return
        chosen = whole_moves(table, candidates)
        rows = np.unique(table.piece_row[chosen[table.piece_move]])
        through = [moves[index] for index in np.flatnonzero(chosen).tolist()]
        most = max((self._readers[move.src_rank] for move in through), default=1)
        if most > 1 and interleaves(
            table.rows[rows], Chunks.of(through, self.cutter), pairs, most, self._costs
        ):
            ways[rows] = WAYS.index(Strategy.INTERLEAVE)


def _program(draft: Draft, pairs: tuple[GroupPair, ...]) -> Program:
    projected = draft.rebuilt.projected.copy()
    projected[:, ProjectColumn.SPAN] += len(draft.spans.table)
    tables = {
        "direct": split_rows(draft.rows(Strategy.SLICES)),
        "packed": draft.rows(Strategy.PACK),
        "spans": draft.all_spans,
        "extracted": draft.spans.extracted(draft.rows(Strategy.WHOLE)),
        "cleared": draft.cleared,
        "interleaved": draft.chunks.interleaved,
        "restored": draft.chunks.restored,
        "projected": projected,
    }
    shapes = [rows.shape for rows in tables.values()]
    content = hashlib.sha256(repr((draft.dst_rank, pairs, shapes)).encode())
    for rows in tables.values():
        content.update(rows.astype("<i8").tobytes())
    return Program(content.hexdigest()[:32], draft.dst_rank, pairs, **tables)
