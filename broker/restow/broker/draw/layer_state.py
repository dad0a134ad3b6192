"""The state of a layer: fields that share pages, all that holds them, and all their moves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from restow.broker.layout import Layout, RankLayout, Region
from restow.broker.layout.difference import field_class, field_layer
from restow.broker.planner.plan import Move, Plan
from restow.broker.planner.recompute import InputRead, Rebuilt


@dataclass(frozen=True, slots=True)
class LayerState:
    """One layer, or several where they lie in one page.

    ``source`` and ``destination`` are the ranks that hold something of it, and no more of them
    than that. ``rebuilt`` is what would have been moved, had D not read ``inputs`` instead.
    """

    fields: tuple[str, ...]
    source: tuple[RankLayout, ...]
    destination: tuple[RankLayout, ...]
    moves: tuple[Move, ...]
    rebuilt: tuple[Move, ...] = ()
    inputs: tuple[InputRead, ...] = ()

    @property
    def layers(self) -> tuple[str, ...]:
        """The numbers of its layers; a field of no layer stands for itself."""
        return tuple(dict.fromkeys(field_layer(field) or field for field in self.fields))

    @property
    def bytes(self) -> int:
        """What is read, counting one token of per-token fields."""
        return sum(one.bytes for one in self.moves) + sum(one.bytes for one in self.inputs)

    @property
    def word(self) -> str:
        """What it is called in a sentence."""
        count = len(self.layers)
        return "layer" if count == 1 else f"page of {count} layers"

    def classes(self) -> dict[str, str]:
        """The class of each field."""
        return {field: field_class(field) for field in self.fields}

    def names(self) -> dict[str, str]:
        """What each field is called beside the others: by its class, if that is clear."""
        classes = self.classes()
        return classes if len(set(classes.values())) == len(classes) else {f: f for f in classes}

    def form(self) -> object:
        """Equal for those that look alike, on whatever ranks."""
        names = self.names()
        src = {rank.rank: index for index, rank in enumerate(self.source)}
        dst = {rank.rank: index for index, rank in enumerate(self.destination)}
        moves, rebuilt = (
            tuple(
                (names[move.field], src[move.src_rank], dst[move.dst_rank], move.box)
                for move in some
            )
            for some in (self.moves, self.rebuilt)
        )
        sides = self.source, self.destination
        return tuple(tuple(_form(rank, names) for rank in side) for side in sides), moves, rebuilt


def _form(rank: RankLayout, names: dict[str, str]) -> object:
    number = {region.name: str(index) for index, region in enumerate(rank.regions)}
    return (
        tuple((one.page_stride_bytes, one.page_tokens, one.tokens) for one in rank.regions),
        tuple(replace(s, field=names[s.field], region=number[s.region]) for s in rank.shards),
        tuple(replace(s, region=number[s.region]) for s in rank.scratch),
        tuple(replace(s, field="", box=(), region=number[s.region]) for s in rank.inputs),
    )


def layer_states(plan: Plan, rebuilt: Sequence[Rebuilt] = ()) -> tuple[LayerState, ...]:
    """All of which something moves, in the order of the model's fields.

    ``rebuilt`` is what the ranks of D need not be sent. Fields of drafts that one side alone has
    are left out: nothing of them moves.
    """
    wanted = {field.name for field in plan.destination.model.fields} - plan.cold
    names = [field.name for field in plan.source.model.fields if field.name in wanted]
    group_of = _groups(plan, names)
    members: dict[int, list[str]] = defaultdict(list)
    for name in names:
        members[group_of[name]].append(name)
    spared = {(move.dst_rank, move.field, move.box) for one in rebuilt for move in one.moves}
    moves: dict[int, list[Move]] = defaultdict(list)
    instead: dict[int, list[Move]] = defaultdict(list)
    for move in plan.moves:
        is_spared = (move.dst_rank, move.field, move.box) in spared
        (instead if is_spared else moves)[group_of[move.field]].append(move)
    by_layer = {field_layer(name): group_of[name] for name in names}
    inputs: dict[int, list[InputRead]] = defaultdict(list)
    for read in (read for one in rebuilt for read in one.inputs):
        layer = field_layer(read.shard.field)
        if layer in by_layer:
            inputs[by_layer[layer]].append(read)
    source, destination = _split(plan.source, group_of), _split(plan.destination, group_of)
    return tuple(
        LayerState(
            tuple(fields),
            tuple(source[group]),
            tuple(destination[group]),
            tuple(moves[group]),
            tuple(instead[group]),
            tuple(inputs[group]),
        )
        for group, fields in members.items()
        if moves[group]
    )


def _groups(plan: Plan, names: Sequence[str]) -> dict[str, int]:
    """For each field the number of its group: those of its layer, and all that share pages."""
    together: dict[object, list[str]] = defaultdict(list)
    for name in names:
        together[name.removesuffix(field_class(name)) or name].append(name)
    known = set(names)
    for side in (plan.source, plan.destination):
        for rank in side.ranks:
            for shard in rank.shards:
                if shard.field in known:
                    together[id(side), rank.rank, shard.region].append(shard.field)
    groups: list[set[str]] = []
    for some in dict.fromkeys(map(tuple, together.values())):
        touched = [group for group in groups if not group.isdisjoint(some)]
        groups = [group for group in groups if group.isdisjoint(some)]
        groups.append(set(some).union(*touched))
    return {name: number for number, group in enumerate(groups) for name in group}


def _split(layout: Layout, group_of: dict[str, int]) -> dict[int, list[RankLayout]]:
    """For each group its part of the ranks that have one."""
    found: dict[int, list[RankLayout]] = defaultdict(list)
    for rank in layout.ranks:
        shards = tuple(shard for shard in rank.shards if shard.field in group_of)
        groups = {shard.region: group_of[shard.field] for shard in shards}
        parts: dict[int, list[list[Any]]] = defaultdict(lambda: [[], [], [], []])
        held: tuple[Sequence[Any], ...] = rank.regions, shards, rank.scratch, rank.inputs
        for index, several in enumerate(held):
            for one in several:
                region = one.name if isinstance(one, Region) else one.region
                if region in groups:
                    parts[groups[region]][index].append(one)
        for group, its in parts.items():
            found[group].append(RankLayout(rank.rank, *map(tuple, its)))
    return found
