"""Compile a plan: one program for each destination rank, its rows dealt out to the ways."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from restow.broker.layout.rows import Int64s
from restow.broker.planner.choice import choose_ways, interleaves, snapshots
from restow.broker.planner.clearing import cleared_rows
from restow.broker.planner.cost_model import CostModel
from restow.broker.planner.interleave import Chunks, whole_moves
from restow.broker.planner.move import Move
from restow.broker.planner.plan import Plan
from restow.broker.planner.program import GroupPair, Program, no_rows
from restow.broker.planner.spans import Spans
from restow.broker.planner.strategy import WAYS, Strategy
from restow.broker.planner.table import Cutter, Table, split_rows


@dataclass(frozen=True, slots=True)
class Draft:
    """A program before it is written down: its moves, their rows, and how each of these travels.

    ``ways`` are indices into `WAYS`, one a row; ``spans`` cover the rows that go ``whole``, and
    ``chunks`` hold what goes by ``interleave``.
    """

    dst_rank: int
    moves: tuple[Move, ...]
    table: Table
    ways: Int64s
    spans: Spans
    chunks: Chunks
    cleared: Int64s

    def rows(self, way: Strategy) -> Int64s:
        """The rows that travel in this way."""
        rows: Int64s = self.table.rows[self.ways == WAYS.index(way)]
        return rows


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
    cutter, costs = Cutter(plan), costs or CostModel()
    forced = strategy is Strategy.WHOLE
    by_rank: dict[int, list[Move]] = defaultdict(list)
    for move in plan.moves:
        by_rank[move.dst_rank].append(move)
    readers = _readers(plan)
    drafts = []
    for rank in plan.destination.ranks:
        moves = tuple(by_rank[rank.rank])
        table = cutter.table(moves)
        ways = choose_ways(table.rows, cutter.pairs, strategy, costs)
        if strategy is Strategy.AUTO:
            _interleave_packed(moves, table, ways, cutter, readers, costs)
        mixed = ways[table.piece_row] == WAYS.index(Strategy.INTERLEAVE)
        through = [moves[index] for index in np.unique(table.piece_move[mixed]).tolist()]
        whole = table.rows[ways == WAYS.index(Strategy.WHOLE)]
        spans = Spans.of(whole, cutter.pairs, None if forced else costs.gap_bytes)
        cleared = cleared_rows(rank, cutter.pairs) if moves else no_rows()
        chunks = Chunks.of(through, cutter)
        drafts.append(Draft(rank.rank, moves, table, ways, spans, chunks, cleared))
    return cutter.pairs, drafts


def _readers(plan: Plan) -> dict[int, int]:
    """How many destination ranks read from each source rank."""
    pairs = {(move.src_rank, move.dst_rank) for move in plan.moves}
    return Counter(src_rank for src_rank, _ in pairs)


def _interleave_packed(
    moves: Sequence[Move],
    table: Table,
    ways: Int64s,
    cutter: Cutter,
    readers: dict[int, int],
    costs: CostModel,
) -> None:
    """Have states that were to be packed for one reader after the other permuted for all at once.

    Changes ``ways``, where that costs less.
    """
    candidates = ways == WAYS.index(Strategy.PACK)
    candidates &= snapshots(table.rows, cutter.pairs)
    if not candidates.any():
        return
    chosen = whole_moves(table, candidates)
    rows = np.unique(table.piece_row[chosen[table.piece_move]])
    through = [moves[index] for index in np.flatnonzero(chosen).tolist()]
    most = max((readers[move.src_rank] for move in through), default=1)
    if most > 1 and interleaves(
        table.rows[rows], Chunks.of(through, cutter), cutter.pairs, most, costs
    ):
        ways[rows] = WAYS.index(Strategy.INTERLEAVE)


def _program(draft: Draft, pairs: tuple[GroupPair, ...]) -> Program:
    tables = {
        "direct": split_rows(draft.rows(Strategy.SLICES)),
        "packed": draft.rows(Strategy.PACK),
        "spans": draft.spans.table,
        "extracted": draft.spans.extracted(draft.rows(Strategy.WHOLE)),
        "cleared": draft.cleared,
        "interleaved": draft.chunks.interleaved,
        "restored": draft.chunks.restored,
    }
    shapes = [rows.shape for rows in tables.values()]
    content = hashlib.sha256(repr((draft.dst_rank, pairs, shapes)).encode())
    for rows in tables.values():
        content.update(rows.astype("<i8").tobytes())
    return Program(content.hexdigest()[:32], draft.dst_rank, pairs, **tables)
