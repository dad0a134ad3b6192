"""Compile a plan: one program for each destination rank, its rows dealt out to the ways."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from restow.broker.layout.rows import Int64s
from restow.broker.planner.choice import choose_ways, least_seconds
from restow.broker.planner.clearing import cleared_rows
from restow.broker.planner.move import Move
from restow.broker.planner.plan import Plan
from restow.broker.planner.program import GroupPair, Program, ProjectColumn, no_rows
from restow.broker.planner.recompute import Rebuilt, recompute_of
from restow.broker.planner.spans import Spans
from restow.broker.planner.strategy import WAYS, CostModel, Strategy
from restow.broker.planner.table import Cutter, Table, split_rows


@dataclass(frozen=True, slots=True)
class Draft:
    """A program before it is written down: its moves, their rows, and how each of these travels.

    ``ways`` are indices into `WAYS`, one a row; ``spans`` cover the rows that go ``whole``;
    ``rebuilt`` is what needs no move.
    """

    dst_rank: int
    moves: tuple[Move, ...]
    table: Table
    ways: Int64s
    spans: Spans
    cleared: Int64s
    rebuilt: Rebuilt = field(default_factory=Rebuilt)

    @property
    def all_spans(self) -> Int64s:
        """Those of inputs follow the others."""
        return np.concatenate([self.spans.table, self.rebuilt.spans])

    def rows(self, way: Strategy) -> Int64s:
        """The rows that travel in this way."""
        rows: Int64s = self.table.rows[self.ways == WAYS.index(way)]
        return rows


def compile_programs(
    plan: Plan, strategy: Strategy = Strategy.AUTO, costs: CostModel | None = None
) -> tuple[Program, ...]:
    """One program for each destination rank, in their order.

    Raises `StrategyRefusedError` where ``slices`` would have to change a dtype, and where
    ``recompute`` finds nothing to rebuild.
    """
    pairs, drafts = draft_programs(plan, strategy, costs)
    return tuple(_program(draft, pairs) for draft in drafts)


def draft_programs(
    plan: Plan, strategy: Strategy = Strategy.AUTO, costs: CostModel | None = None
) -> tuple[tuple[GroupPair, ...], list[Draft]]:
    """The pairs of page lists and the drafts of all programs. Raises as `compile_programs`."""
    cutter, costs = Cutter(plan), costs or CostModel()
    forced = strategy is Strategy.WHOLE
    by_rank: dict[int, list[Move]] = defaultdict(list)
    for move in plan.moves:
        by_rank[move.dst_rank].append(move)
    recompute = recompute_of(plan, strategy)
    drafts = []
    for rank in plan.destination.ranks:
        moves, rebuilt = tuple(by_rank[rank.rank]), Rebuilt()
        if recompute is not None:
            rebuilt = recompute.rebuilt(rank, cutter)
            if strategy is Strategy.AUTO and not _pays(rebuilt, cutter, costs):
                rebuilt = Rebuilt()
        sent = rebuilt.without(moves)
        table = cutter.table(sent)
        ways = choose_ways(table.rows, cutter.pairs, strategy, costs)
        whole = table.rows[ways == WAYS.index(Strategy.WHOLE)]
        spans = Spans.of(whole, cutter.pairs, None if forced else costs.gap_bytes)
        cleared = cleared_rows(rank, cutter.pairs) if moves else no_rows()
        drafts.append(Draft(rank.rank, sent, table, ways, spans, cleared, rebuilt))
    return cutter.pairs, drafts


def _pays(rebuilt: Rebuilt, cutter: Cutter, costs: CostModel) -> bool:
    """Whether rebuilding windows costs less than sending them.

    The ways of rows count each element of a strided row as a piece. That is far too much for long
    rows, so what a gather and a scatter cost is counted by rows as well.
    """
    if not rebuilt.moves:
        return False
    rows = cutter.table(rebuilt.moves).rows
    size = sum(move.bytes for move in rebuilt.moves)
    copied_s = (
        costs.seconds_per_stage
        + 2 * costs.seconds_per_launch
        + 2 * len(rows) * costs.seconds_per_copy
        + size * (1 / costs.read_bytes_per_second + 2 / costs.copy_bytes_per_second)
    )
    sending_s = min(copied_s, least_seconds(rows, cutter.pairs, costs))
    return rebuilt.seconds(costs) < sending_s


def _program(draft: Draft, pairs: tuple[GroupPair, ...]) -> Program:
    projected = draft.rebuilt.projected.copy()
    projected[:, ProjectColumn.SPAN] += len(draft.spans.table)
    tables = {
        "direct": split_rows(draft.rows(Strategy.SLICES)),
        "packed": draft.rows(Strategy.PACK),
        "spans": draft.all_spans,
        "extracted": draft.spans.extracted(draft.rows(Strategy.WHOLE)),
        "cleared": draft.cleared,
        "projected": projected,
    }
    shapes = [rows.shape for rows in tables.values()]
    content = hashlib.sha256(repr((draft.dst_rank, pairs, shapes)).encode())
    for rows in tables.values():
        content.update(rows.astype("<i8").tobytes())
    return Program(content.hexdigest()[:32], draft.dst_rank, pairs, **tables)
