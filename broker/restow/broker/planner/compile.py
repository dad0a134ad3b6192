"""Compile a plan: one program for each destination rank, its rows dealt out to the strategies."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from restow.broker.errors import StrategyRefusedError
from restow.broker.layout import DType
from restow.broker.layout.rows import Bools, Int64s
from restow.broker.planner.move import Move
from restow.broker.planner.plan import Plan
from restow.broker.planner.program import Column, GroupPair, Program
from restow.broker.planner.strategy import CostModel, Strategy
from restow.broker.planner.table import ITEM_BYTES, Cutter, Table, split_rows


@dataclass(frozen=True, slots=True)
class Draft:
    """A program before it is written down: its moves, their rows, and which of these are packed."""

    dst_rank: int
    moves: tuple[Move, ...]
    table: Table
    packed: Bools


def compile_programs(
    plan: Plan, strategy: Strategy = Strategy.AUTO, costs: CostModel | None = None
) -> tuple[Program, ...]:
    """One program for each destination rank, in their order.

    Raises `StrategyRefusedError` where ``slices`` would have to change a dtype.
    """
    pairs, drafts = draft_programs(plan, strategy, costs)
    return tuple(_program(draft, pairs) for draft in drafts)


def draft_programs(
    plan: Plan, strategy: Strategy = Strategy.AUTO, costs: CostModel | None = None
) -> tuple[tuple[GroupPair, ...], list[Draft]]:
    """The pairs of page lists and the drafts of all programs. Raises as `compile_programs`."""
    cutter = Cutter(plan)
    by_rank: dict[int, list[Move]] = defaultdict(list)
    for move in plan.moves:
        by_rank[move.dst_rank].append(move)
    drafts = []
    for rank in plan.destination.ranks:
        moves = tuple(by_rank[rank.rank])
        table = cutter.table(moves)
        packed = _packed(table.rows, cutter.pairs, strategy, costs or CostModel())
        drafts.append(Draft(rank.rank, moves, table, packed))
    return cutter.pairs, drafts


def _program(draft: Draft, pairs: tuple[GroupPair, ...]) -> Program:
    direct = split_rows(draft.table.rows[~draft.packed])
    packed = draft.table.rows[draft.packed]
    content = hashlib.sha256(repr((draft.dst_rank, pairs, direct.shape)).encode())
    content.update(direct.astype("<i8").tobytes())
    content.update(packed.astype("<i8").tobytes())
    return Program(content.hexdigest()[:32], draft.dst_rank, pairs, direct, packed)


def _packed(
    rows: Int64s, pairs: tuple[GroupPair, ...], strategy: Strategy, costs: CostModel
) -> Bools:
    """Mask of the rows to pack; the others are read into place."""
    casts: Bools = rows[:, Column.SRC_DTYPE] != rows[:, Column.DST_DTYPE]
    if strategy is Strategy.PACK:
        return np.ones_like(casts)
    if strategy is Strategy.AUTO:
        return casts | _worth_packing(rows, pairs, costs, asked=bool(casts.any()))
    if casts.any():
        row = rows[int(np.argmax(casts))]
        raise StrategyRefusedError(
            f"slices can't turn {DType(row[Column.SRC_DTYPE]).label} into "
            f"{DType(row[Column.DST_DTYPE]).label}: use pack or auto",
            strategy=strategy,
        )
    return casts


def _worth_packing(
    rows: Int64s, pairs: tuple[GroupPair, ...], costs: CostModel, asked: bool
) -> Bools:
    """Mask of the rows whose pieces are so small that two more copies cost less.

    Together they must also pay for asking the source, unless it is ``asked`` anyway.
    """
    descriptors, sizes = row_costs(rows, pairs, costs.nominal_tokens)
    small: Bools = descriptors * costs.seconds_per_descriptor > (
        2 * sizes / costs.pack_bytes_per_second
    )
    if not asked and not costs.pays_stage(
        float(descriptors[small].sum()), float(sizes[small].sum())
    ):
        small[:] = False
    return small


def token_counts(pairs: tuple[GroupPair, ...], tokens: int) -> Int64s:
    """How often the rows of each pair repeat for a prompt of ``tokens``."""
    counts = [tokens - pair.first_token(0, tokens) if pair.per_token else 1 for pair in pairs]
    return np.array(counts, np.int64)


def row_costs(rows: Int64s, pairs: tuple[GroupPair, ...], tokens: int) -> tuple[Int64s, Int64s]:
    """Descriptors and bytes of each row when read one by one for a prompt of ``tokens``.

    Pieces of neighbouring pages that could still be joined count apart.
    """
    page_tokens = np.array([[p.src.page_tokens, p.dst.page_tokens] for p in pairs], np.int64)
    page_tokens = page_tokens.reshape(-1, 2)[rows[:, Column.GROUP_PAIR]]
    per_token = page_tokens[:, 0] > 0
    repeats = token_counts(pairs, tokens)[rows[:, Column.GROUP_PAIR]]
    row_bytes = rows[:, Column.COUNT] * ITEM_BYTES[rows[:, Column.SRC_DTYPE]]
    item = ITEM_BYTES[rows[:, Column.SRC_DTYPE]]
    contiguous = rows[:, Column.SRC_STEP_BYTES] == item
    contiguous &= rows[:, Column.DST_STEP_BYTES] == item
    # A run, and also single elements of a strided row, may go on from token to token.
    length = np.where(contiguous, row_bytes, item)
    joined = per_token & (rows[:, Column.SRC_TOKEN_STRIDE_BYTES] == length)
    joined &= rows[:, Column.DST_TOKEN_STRIDE_BYTES] == length
    sizes = np.maximum(page_tokens, 1)
    edges = -(-repeats[:, None] // sizes)
    stretches = edges.sum(axis=1) - -(-repeats // np.lcm(sizes[:, 0], sizes[:, 1]))
    pieces = np.where(contiguous, 1, rows[:, Column.COUNT])
    return pieces * np.where(joined, stretches, repeats), row_bytes * repeats
