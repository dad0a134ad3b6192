"""What a plan means, for people: who reads what from whom, and what each strategy would cost.

Pure: a model of what is shown. The CLI only draws it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from restow.broker.errors import StrategyRefusedError, TooManyPiecesError
from restow.broker.layout import Box, RankLayout, TokenClass
from restow.broker.layout.difference import field_class, joined_name
from restow.broker.layout.span import overlap
from restow.broker.layout.values import ITEM_BYTES
from restow.broker.planner.compile import Cost, Draft, draft_programs, estimate
from restow.broker.planner.costs import CostModel
from restow.broker.planner.plan import Plan
from restow.broker.planner.program import Column, GroupPair
from restow.broker.planner.program.programs import strided
from restow.broker.planner.recompute import Rebuilt
from restow.broker.strategy import STRATEGIES, Strategy

Replicas = dict[str, dict[tuple[Box, TokenClass], tuple[int, ...]]]
"""For each field, box and class of tokens: the ranks that hold it."""


@dataclass(frozen=True, slots=True)
class ReadBox:
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
    parts: tuple[ReadBox, ...]
    strategy: str
    bytes: int

    @property
    def name(self) -> str:
        """All the fields in one word, such as ``layers.{0,2,4..}.conv.x``."""
        return joined_name(self.fields)


@dataclass(frozen=True, slots=True)
class RankLines:
    """What one destination rank does. ``bytes_from`` counts one token of each per-token move."""

    dst_rank: int
    bytes: int
    bytes_at_tokens: int
    bytes_from: dict[int, int]
    token_bytes_from: dict[int, int]
    """Of these, the token's."""
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
    by_strategy: dict[Strategy, Sequence[Cost | str]] = {}
    for other in Strategy:
        try:
            theirs, made = draft_programs(plan, other, costs)
            by_strategy[other] = [_cost_or_reason(one, theirs, tokens, costs) for one in made]
        except StrategyRefusedError as error:
            by_strategy[other] = [error.message] * len(drafts)
    replicas = holders(plan.source.ranks)
    entries = plan.entries(tokens)
    return tuple(
        _rank_lines(
            draft,
            estimate(draft.shares, pairs, tokens, costs),
            {other: found[index] for other, found in by_strategy.items()},
            replicas,
            entries,
            tokens,
        )
        for index, draft in enumerate(drafts)
    )


def _cost_or_reason(
    draft: Draft, pairs: tuple[GroupPair, ...], tokens: int, costs: CostModel
) -> Cost | str:
    try:
        return estimate(draft.shares, pairs, tokens, costs)
    except TooManyPiecesError as error:
        return error.message


@dataclass(frozen=True, slots=True)
class _Read:
    """A part of one field, or of inputs that fields are rebuilt from."""

    field: str
    per_token: bool
    way: str
    bytes: int
    entries: int
    part: ReadBox


def _rank_lines(
    draft: Draft,
    cost: Cost,
    by_strategy: dict[Strategy, Cost | str],
    replicas: Replicas,
    entries: dict[str, int],
    tokens: int,
) -> RankLines:
    rebuilt = Rebuilt.among(draft.shares)
    reads = [*_moved(draft, replicas, entries, tokens), *_inputs(rebuilt)]
    bytes_from: Counter[int] = Counter()
    token_bytes_from: Counter[int] = Counter()
    classes: dict[int, dict[str, None]] = defaultdict(dict)
    for read in reads:
        bytes_from[read.part.src_rank] += read.bytes
        token_bytes_from[read.part.src_rank] += read.bytes * read.per_token
        classes[read.part.src_rank][field_class(read.field)] = None
    ways: dict[str, set[str]] = defaultdict(set)
    for read in reads:
        if read.field in entries:
            ways[field_class(read.field)].add(read.way)
    for name in rebuilt.names:
        ways[field_class(name)].add(Strategy.RECOMPUTE.value)
    return RankLines(
        dst_rank=draft.dst_rank,
        bytes=bytes_from.total(),
        bytes_at_tokens=sum(read.bytes * read.entries for read in reads),
        bytes_from=dict(sorted(bytes_from.items())),
        token_bytes_from=token_bytes_from,
        classes_from={src: tuple(found) for src, found in sorted(classes.items())},
        strategy={name: _one_way(found) for name, found in ways.items()},
        cost=cost,
        cost_by_strategy=by_strategy,
        fields=_field_lines(reads),
        rebuilt=rebuilt,
    )


def _moved(
    draft: Draft, replicas: Replicas, entries: dict[str, int], tokens: int
) -> Iterable[_Read]:
    """What is read of fields."""
    ways: list[set[str]] = [set() for _ in draft.moves]
    piece_way = draft.ways[draft.table.piece_row].tolist()
    for index, way in zip(draft.table.piece_move.tolist(), piece_way, strict=True):
        ways[index].add(STRATEGIES[way].value)
    for move, found, pieces, size in zip(draft.moves, ways, *_runs(draft), strict=True):
        held = replicas[move.field]
        sharing = next(
            ranks
            for (box, kept), ranks in held.items()
            if kept == move.src.tokens and overlap(move.box, box) == move.box
        )
        src, dst = move.src.dtype, move.dst.dtype
        cast = "" if src is dst else f"{src.label} to {dst.label}"
        part = ReadBox(move.box, move.src_rank, sharing, pieces, size, cast)
        moved = move.entries(entries[move.field], tokens)
        yield _Read(move.field, move.per_token, _one_way(found), move.bytes, moved, part)


def _inputs(rebuilt: Rebuilt) -> Iterable[_Read]:
    """What is read to rebuild other fields."""
    for one in rebuilt.inputs:
        part = ReadBox(one.shard.box, one.src_rank, one.replicas, 1, one.bytes, "")
        yield _Read(one.shard.field, False, Strategy.RECOMPUTE.value, one.bytes, 1, part)


def _one_way(ways: set[str]) -> str:
    return next(iter(ways)) if len(ways) == 1 else "mixed"


def _field_lines(reads: Iterable[_Read]) -> tuple[FieldLine, ...]:
    """One line for all fields of a class whose parts are the same."""
    by_field: dict[str, list[_Read]] = defaultdict(list)
    for read in reads:
        by_field[read.field].append(read)
    alike: dict[tuple[str, str, tuple[ReadBox, ...]], list[str]] = defaultdict(list)
    for name, found in by_field.items():
        way = _one_way({read.way for read in found})
        alike[field_class(name), way, tuple(read.part for read in found)].append(name)
    return tuple(
        FieldLine(
            field_class=name,
            fields=tuple(fields),
            per_token=by_field[fields[0]][0].per_token,
            parts=parts,
            strategy=way,
            bytes=sum(read.bytes for field in fields for read in by_field[field]),
        )
        for (name, way, parts), fields in alike.items()
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


def by_way(ways: dict[str, str]) -> dict[str, list[str]]:
    """The classes of fields that travel each way, of what each class does."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, way in ways.items():
        found[way].append(name)
    return found


def holders(ranks: Sequence[RankLayout]) -> Replicas:
    """For each field, box and class of tokens: the ranks that hold it."""
    found: dict[str, dict[tuple[Box, TokenClass], list[int]]]
    found = defaultdict(lambda: defaultdict(list))
    for rank in ranks:
        tokens = {region.name: region.tokens for region in rank.regions}
        for shard in rank.shards:
            found[shard.field][shard.box, tokens[shard.region]].append(rank.rank)
    return {
        name: {part: tuple(sorted(held)) for part, held in parts.items()}
        for name, parts in found.items()
    }
