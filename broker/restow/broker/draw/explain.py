"""What a plan means, for people: who reads what from whom, and what each strategy would cost.

Pure: a model of what is shown. The CLI only draws it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from restow.broker.errors import StrategyRefusedError, TooManyPiecesError
from restow.broker.layout import Box
from restow.broker.layout.dtype import ITEM_BYTES
from restow.broker.layout.names import field_class, joined_name
from restow.broker.planner.compile import draft_programs
from restow.broker.planner.cost_model import CostModel
from restow.broker.planner.draft import Draft
from restow.broker.planner.estimate import Cost, estimate
from restow.broker.planner.move import Move
from restow.broker.planner.plan import Plan
from restow.broker.planner.program import Column, GroupPair
from restow.broker.planner.program.rows import strided
from restow.broker.planner.ways.recompute import InputRead, Rebuilt
from restow.broker.strategy import STRATEGIES, Strategy


@dataclass(frozen=True, slots=True)
class Part:
    """A box that comes from ``src_rank``; ``replicas`` are the ranks that could have served it.

    It falls into ``pieces`` runs of ``piece_bytes``, for each token where the field is per-token.
    """

    box: Box
    src_rank: int
    replicas: tuple[int, ...]
    pieces: int
    piece_bytes: int
    cast: str


@dataclass(frozen=True, slots=True)
class FieldLine:
    """Fields that are moved alike: one class of field in some layers.

    ``bytes`` counts all layers, and one token where the field is ``per_token``.
    """

    field_class: str
    fields: tuple[str, ...]
    per_token: bool
    parts: tuple[Part, ...]
    strategy: str
    bytes: int

    @property
    def name(self) -> str:
        """All the fields in one word, such as ``layers.{0,2,4..}.conv.x``."""
        return joined_name(self.fields)


@dataclass(frozen=True, slots=True)
class RankLines:
    """What one destination rank does. ``bytes_from`` counts one token of per-token fields."""

    dst_rank: int
    bytes: int
    bytes_at_tokens: int
    bytes_from: dict[int, int]
    classes_from: dict[int, tuple[str, ...]]
    strategy: dict[str, str]
    cost: Cost
    cost_by_strategy: dict[Strategy, Cost | str]
    """What each strategy would cost, or why it can't serve."""
    fields: tuple[FieldLine, ...]
    rebuilt: Rebuilt
    """What is not moved."""


def explain(
    plan: Plan,
    strategy: Strategy = Strategy.AUTO,
    tokens: int = 8192,
    costs: CostModel | None = None,
) -> tuple[RankLines, ...]:
    """Every destination rank's part of the plan. Raises as `compile_programs`."""
    costs = costs or CostModel()
    pairs, drafts = draft_programs(plan, strategy, costs)
    others: dict[Strategy, list[Draft] | str] = {}
    for other in Strategy:
        try:
            others[other] = draft_programs(plan, other, costs)[1]
        except StrategyRefusedError as error:
            others[other] = error.message
    replicas = _replicas(plan)
    entries = {field.name: field.entries(tokens) for field in plan.source.model.fields}
    lines = []
    for index, draft in enumerate(drafts):
        by_strategy = {
            other: made
            if isinstance(made, str)
            else _cost_or_reason(made[index], pairs, tokens, costs)
            for other, made in others.items()
        }
        cost = estimate(draft.shares, pairs, tokens, costs)
        lines.append(_rank_lines(draft, cost, by_strategy, replicas, entries))
    return tuple(lines)


def _cost_or_reason(
    draft: Draft, pairs: tuple[GroupPair, ...], tokens: int, costs: CostModel
) -> Cost | str:
    try:
        return estimate(draft.shares, pairs, tokens, costs)
    except TooManyPiecesError as error:
        return error.message


def _rank_lines(
    draft: Draft,
    cost: Cost,
    by_strategy: dict[Strategy, Cost | str],
    replicas: dict[str, dict[Box, tuple[int, ...]]],
    entries: dict[str, int],
) -> RankLines:
    moves, rebuilt = draft.moves, Rebuilt.among(draft.shares)
    bytes_from: Counter[int] = Counter()
    classes: dict[int, dict[str, None]] = defaultdict(dict)
    for move in moves:
        bytes_from[move.src_rank] += move.bytes
        classes[move.src_rank][field_class(move.field)] = None
    for one in rebuilt.inputs:
        bytes_from[one.src_rank] += one.bytes
        classes[one.src_rank][field_class(one.shard.field)] = None
    ways = _ways(draft)
    by_class: dict[str, list[str]] = defaultdict(list)
    for move, way in zip(moves, ways, strict=True):
        by_class[field_class(move.field)].append(way)
    for name in rebuilt.names:
        by_class[field_class(name)].append(Strategy.RECOMPUTE.value)
    return RankLines(
        dst_rank=draft.dst_rank,
        bytes=sum(bytes_from.values()),
        bytes_at_tokens=sum(move.bytes * entries[move.field] for move in moves)
        + sum(one.bytes for one in rebuilt.inputs),
        bytes_from=dict(sorted(bytes_from.items())),
        classes_from={src: tuple(found) for src, found in sorted(classes.items())},
        strategy={name: _one_way(found) for name, found in by_class.items()},
        cost=cost,
        cost_by_strategy=by_strategy,
        fields=_field_lines(draft, ways, replicas) + _input_lines(rebuilt),
        rebuilt=rebuilt,
    )


def _ways(draft: Draft) -> list[str]:
    """How each move travels."""
    found: list[set[str]] = [set() for _ in draft.moves]
    piece_way = draft.ways[draft.table.piece_row].tolist()
    for index, way in zip(draft.table.piece_move.tolist(), piece_way, strict=True):
        found[index].add(STRATEGIES[way].value)
    return [_one_way(ways) for ways in found]


def _one_way(ways: Iterable[str]) -> str:
    found = set(ways)
    return found.pop() if len(found) == 1 else "mixed"


def _field_lines(
    draft: Draft, ways: list[str], replicas: dict[str, dict[Box, tuple[int, ...]]]
) -> tuple[FieldLine, ...]:
    """One line for all fields of a class whose parts are the same."""
    parts: dict[str, list[Part]] = defaultdict(list)
    moved: dict[str, list[Move]] = defaultdict(list)
    by_field: dict[str, list[str]] = defaultdict(list)
    for move, way, runs, size in zip(draft.moves, ways, *_runs(draft), strict=True):
        held = replicas[move.field]
        sharing = next(ranks for box, ranks in held.items() if _inside(move.box, box))
        src, dst = move.src.dtype, move.dst.dtype
        cast = "" if src is dst else f"{src.label} to {dst.label}"
        parts[move.field].append(Part(move.box, move.src_rank, sharing, runs, size, cast))
        moved[move.field].append(move)
        by_field[move.field].append(way)
    alike: dict[tuple[str, str, tuple[Part, ...]], list[str]] = defaultdict(list)
    for name, found in parts.items():
        alike[field_class(name), _one_way(by_field[name]), tuple(found)].append(name)
    return tuple(
        FieldLine(
            field_class=name,
            fields=tuple(fields),
            per_token=moved[fields[0]][0].per_token,
            parts=found,
            strategy=way,
            bytes=sum(move.bytes for field in fields for move in moved[field]),
        )
        for (name, way, found), fields in alike.items()
    )


def _input_lines(rebuilt: Rebuilt) -> tuple[FieldLine, ...]:
    """What is read to rebuild other fields."""
    alike: dict[tuple[Part, ...], list[InputRead]] = defaultdict(list)
    for one in rebuilt.inputs:
        part = Part(one.shard.box, one.src_rank, one.replicas, 1, one.bytes, "")
        alike[(part,)].append(one)
    return tuple(
        FieldLine(
            field_class=field_class(read[0].shard.field),
            fields=tuple(one.shard.field for one in read),
            per_token=False,
            parts=parts,
            strategy=Strategy.RECOMPUTE.value,
            bytes=sum(one.bytes for one in read),
        )
        for parts, read in alike.items()
    )


def _runs(draft: Draft) -> tuple[list[int], list[int]]:
    """Runs of bytes that each move falls into when it is read into place, and their length."""
    pieces, move = draft.table.pieces, draft.table.piece_move
    wide = strided(pieces)
    item = ITEM_BYTES[pieces[:, Column.SRC_DTYPE]]
    runs = np.zeros(len(draft.moves), np.int64)
    np.add.at(runs, move, np.where(wide, pieces[:, Column.COUNT], 1))
    sizes = np.zeros(len(draft.moves), np.int64)
    sizes[move] = np.where(wide, item, pieces[:, Column.COUNT])  # equal within a move
    return runs.tolist(), sizes.tolist()


def _inside(inner: Box, outer: Box) -> bool:
    return all(a.start >= b.start and a.stop <= b.stop for a, b in zip(inner, outer, strict=True))


def _replicas(plan: Plan) -> dict[str, dict[Box, tuple[int, ...]]]:
    """For each field and box of the source: the ranks that hold it."""
    found: dict[str, dict[Box, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank in plan.source.ranks:
        for shard in rank.shards:
            found[shard.field][shard.box].append(rank.rank)
    return {
        name: {box: tuple(sorted(ranks)) for box, ranks in boxes.items()}
        for name, boxes in found.items()
    }
