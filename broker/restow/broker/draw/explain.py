"""Explain a plan: which rank reads what from which, and what each strategy would cost.

The functions are pure. They return values that the commands print as tables or JSON.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from restow.broker.draw.layer_pages import cut_axes
from restow.broker.errors import StrategyRefusedError, TooManyPiecesError
from restow.broker.layout import Box, RankLayout, TokenClass
from restow.broker.layout.difference import field_class, joined_name
from restow.broker.layout.span import overlap
from restow.broker.planner.compile import Cost, Draft, draft_programs, estimate
from restow.broker.planner.costs import CostModel
from restow.broker.planner.plan import Plan
from restow.broker.planner.recompute import Rebuilt
from restow.broker.strategy import STRATEGIES, Strategy

Holders: TypeAlias = dict[str, dict[tuple[Box, TokenClass], tuple[int, ...]]]
"""For each field: its boxes and the tokens of each box, with the ranks that hold them."""


@dataclass(frozen=True, slots=True)
class ReadBox:
    """A box of a field that is read from ``src_rank``; any of the ``replicas`` could serve it.

    Read into place, the box falls into ``pieces`` runs of ``piece_bytes``, counting one token of a
    per-token field.
    """

    field: str
    per_token: bool
    box: Box
    src_rank: int
    replicas: tuple[int, ...]
    pieces: int
    piece_bytes: int
    strategy: str
    cast: str = ""

    @property
    def bytes(self) -> int:
        """The bytes of all pieces."""
        return self.pieces * self.piece_bytes


@dataclass(frozen=True, slots=True)
class FieldLine:
    """Fields of one class that are moved alike, each field in another layer.

    ``bytes`` counts all layers, and one token of a ``per_token`` field.
    """

    field_class: str
    fields: tuple[str, ...]
    per_token: bool
    parts: tuple[ReadBox, ...]
    strategy: str
    bytes: int

    @property
    def name(self) -> str:
        """All fields in one word, such as ``layers.{0,2,4..}.conv.x``."""
        return joined_name(self.fields)


@dataclass(frozen=True, slots=True)
class RankLines:
    """What one rank of D reads. Bytes count one token of per-token fields.

    ``bytes_at_tokens`` counts the whole prompt. ``token_bytes_from`` is the part of ``bytes_from``
    that is read for every token. ``rebuilt`` is what the rank computes and does not read.
    """

    dst_rank: int
    bytes: int
    bytes_at_tokens: int
    bytes_from: dict[int, int]
    token_bytes_from: dict[int, int]
    classes_from: dict[int, tuple[str, ...]]
    strategy: dict[str, str]
    """How each class of field travels."""
    cost: Cost
    cost_by_strategy: dict[Strategy, Cost | str]
    """The cost of each strategy, or why it cannot serve."""
    fields: tuple[FieldLine, ...]
    rebuilt: Rebuilt


def explain(
    plan: Plan,
    strategy: Strategy = Strategy.AUTO,
    tokens: int = 8192,
    costs: CostModel | None = None,
) -> tuple[RankLines, ...]:
    """Return what every rank of D reads. Raises the errors of `compile_programs`."""
    costs = costs or CostModel()
    pairs, drafts = draft_programs(plan, strategy, costs)
    by_strategy = {
        candidate: _costs(plan, candidate, tokens, costs, len(drafts)) for candidate in Strategy
    }
    replicas, entries = holders(plan.source.ranks), plan.entries(tokens)
    lines = []
    for index, draft in enumerate(drafts):
        moved = [move.bytes * move.entries(entries[move.field], tokens) for move in draft.moves]
        cost = estimate(draft.shares, pairs, tokens, costs)
        cost_by_strategy = {
            candidate: rank_costs[index] for candidate, rank_costs in by_strategy.items()
        }
        lines.append(
            _rank_lines(draft, _reads(draft, replicas), sum(moved), cost, cost_by_strategy)
        )
    return tuple(lines)


def holders(ranks: Sequence[RankLayout]) -> Holders:
    """Return the ranks that hold each box of each field."""
    holders_of: Holders = defaultdict(dict)
    for rank in sorted(ranks, key=lambda rank: rank.rank):
        tokens = {region.name: region.tokens for region in rank.regions}
        for shard in rank.shards:
            held, part = holders_of[shard.field], (shard.box, tokens[shard.region])
            held[part] = (*held.get(part, ()), rank.rank)
    return holders_of


def by_way(ways: dict[str, str]) -> dict[str, list[str]]:
    """Return the classes of fields that travel each way."""
    classes_of: dict[str, list[str]] = defaultdict(list)
    for name, way in ways.items():
        classes_of[way].append(name)
    return classes_of


def _costs(
    plan: Plan, strategy: Strategy, tokens: int, costs: CostModel, ranks: int
) -> Sequence[Cost | str]:
    """Return what a strategy costs each rank of D, or why it cannot serve."""
    try:
        pairs, drafts = draft_programs(plan, strategy, costs)
    except StrategyRefusedError as error:
        return [error.message] * ranks
    rank_costs: list[Cost | str] = []
    for draft in drafts:
        try:
            rank_costs.append(estimate(draft.shares, pairs, tokens, costs))
        except TooManyPiecesError as error:
            rank_costs.append(error.message)
    return rank_costs


def _reads(draft: Draft, replicas: Holders) -> Iterator[ReadBox]:
    """Yield the boxes read for moves of a draft, and for inputs that fields are rebuilt from."""
    ways: list[set[str]] = [set() for _ in draft.moves]
    piece_way = draft.ways[draft.table.piece_row].tolist()
    for index, way in zip(draft.table.piece_move.tolist(), piece_way, strict=True):
        ways[index].add(STRATEGIES[way].value)
    for move, move_ways in zip(draft.moves, ways, strict=True):
        sharing = next(
            ranks
            for (box, kept), ranks in replicas[move.field].items()
            if kept == move.src.tokens and overlap(move.box, box) == move.box
        )
        src, dst = move.src.dtype, move.dst.dtype
        pieces = math.prod(move.box[axis].size for axis in cut_axes(move.box, (move.src, move.dst)))
        yield ReadBox(
            move.field,
            move.per_token,
            move.box,
            move.src_rank,
            sharing,
            pieces,
            move.bytes // pieces,
            _one_way(move_ways),
            "" if src is dst else f"{src.label} to {dst.label}",
        )
    for read in Rebuilt.among(draft.shares).inputs:
        held, way = read.shard, Strategy.RECOMPUTE.value
        yield ReadBox(held.field, False, held.box, read.src_rank, read.replicas, 1, read.bytes, way)


def _rank_lines(
    draft: Draft,
    reads: Iterable[ReadBox],
    moved_bytes: int,
    cost: Cost,
    by_strategy: dict[Strategy, Cost | str],
) -> RankLines:
    rebuilt = Rebuilt.among(draft.shares)
    bytes_from: Counter[int] = Counter()
    token_bytes_from: Counter[int] = Counter()
    classes: dict[int, dict[str, None]] = defaultdict(dict)
    ways: dict[str, set[str]] = defaultdict(set)
    inputs = {read.shard.field for read in rebuilt.inputs}
    by_field: dict[str, list[ReadBox]] = defaultdict(list)
    for read in reads:
        name = field_class(read.field)
        bytes_from[read.src_rank] += read.bytes
        token_bytes_from[read.src_rank] += read.bytes * read.per_token
        classes[read.src_rank][name] = None
        by_field[read.field].append(read)
        if read.field not in inputs:
            ways[name].add(read.strategy)
    for name in map(field_class, rebuilt.names):
        ways[name].add(Strategy.RECOMPUTE.value)
    return RankLines(
        dst_rank=draft.dst_rank,
        bytes=bytes_from.total(),
        bytes_at_tokens=moved_bytes + sum(read.bytes for read in rebuilt.inputs),
        bytes_from=dict(sorted(bytes_from.items())),
        token_bytes_from=token_bytes_from,
        classes_from={src: tuple(names) for src, names in sorted(classes.items())},
        strategy={name: _one_way(field_ways) for name, field_ways in ways.items()},
        cost=cost,
        cost_by_strategy=by_strategy,
        fields=_field_lines(by_field),
        rebuilt=rebuilt,
    )


def _one_way(ways: set[str]) -> str:
    return next(iter(ways)) if len(ways) == 1 else "mixed"


def _field_lines(by_field: dict[str, list[ReadBox]]) -> tuple[FieldLine, ...]:
    """Return one line for all fields of a class that are read alike."""
    alike: dict[object, list[str]] = defaultdict(list)
    for name, reads in by_field.items():
        form = tuple(replace(read, field="") for read in reads)
        alike[field_class(name), form].append(name)
    return tuple(
        FieldLine(
            field_class=field_class(first),
            fields=(first, *others),
            per_token=by_field[first][0].per_token,
            parts=tuple(by_field[first]),
            strategy=_one_way({read.strategy for read in by_field[first]}),
            bytes=sum(read.bytes for read in by_field[first]) * (1 + len(others)),
        )
        for first, *others in alike.values()
    )
