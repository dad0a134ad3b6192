"""Units of a plan: the fields that share pages, with all that holds them and all their moves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from restow.broker.layout import Layout, RankLayout
from restow.broker.layout.names import field_class, field_layer
from restow.broker.planner.move import Move
from restow.broker.planner.plan import Plan
from restow.broker.planner.ways.recompute import InputRead, Rebuilt

One = TypeVar("One")


@dataclass(frozen=True, slots=True)
class Unit:
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
        """Equal for units that look alike, on whatever ranks."""
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
    number = {region.name: index for index, region in enumerate(rank.regions)}
    return (
        tuple((region.page_stride_bytes, region.page_tokens) for region in rank.regions),
        tuple(
            (
                *(names[s.field], s.box, s.dtype, number[s.region]),
                *(s.offset_bytes, s.strides_bytes, s.token_stride_bytes),
            )
            for s in rank.shards
        ),
        tuple(
            (number[s.region], s.dtype, s.offset_bytes, s.sizes, s.strides_bytes)
            for s in rank.scratch
        ),
        tuple((number[s.region], s.dtype, s.offset_bytes, s.strides_bytes) for s in rank.inputs),
    )


def units_of(plan: Plan, rebuilt: Sequence[Rebuilt] = ()) -> tuple[Unit, ...]:
    """All units of which something moves, in the order of the model's fields.

    ``rebuilt`` is what the ranks of D need not be sent.
    """
    fields = [field.name for field in plan.source.model.fields]
    owner = {name: name for name in fields}
    together: dict[object, list[str]] = defaultdict(list)
    for name in fields:
        layer = field_layer(name)
        together[name if layer is None else ("layer", layer, name[: name.index(layer)])].append(
            name
        )
    for side in (plan.source, plan.destination):
        for rank in side.ranks:
            for shard in rank.shards:
                together[id(side), rank.rank, shard.region].append(shard.field)
    for names in together.values():
        first = _root(owner, names[0])
        for name in names[1:]:
            owner[_root(owner, name)] = first
    roots = {name: _root(owner, name) for name in fields}
    members: dict[str, list[str]] = defaultdict(list)
    for name in fields:
        members[roots[name]].append(name)
    spared = {(move.dst_rank, move.field, move.box) for one in rebuilt for move in one.moves}
    moves: dict[str, list[Move]] = defaultdict(list)
    instead: dict[str, list[Move]] = defaultdict(list)
    for move in plan.moves:
        is_spared = (move.dst_rank, move.field, move.box) in spared
        (instead if is_spared else moves)[roots[move.field]].append(move)
    by_layer = {field_layer(name): root for name, root in roots.items()}
    inputs: dict[str, list[InputRead]] = defaultdict(list)
    for read in (read for one in rebuilt for read in one.inputs):
        layer = field_layer(read.shard.field)
        if layer in by_layer:
            inputs[by_layer[layer]].append(read)
    source, destination = _split(plan.source, roots), _split(plan.destination, roots)
    return tuple(
        Unit(
            tuple(names),
            tuple(source[root]),
            tuple(destination[root]),
            tuple(moves[root]),
            tuple(instead[root]),
            tuple(inputs[root]),
        )
        for root, names in members.items()
        if moves[root]
    )


def _root(owner: dict[str, str], name: str) -> str:
    while owner[name] != name:
        owner[name] = name = owner[owner[name]]
    return name


def _split(layout: Layout, roots: dict[str, str]) -> dict[str, list[RankLayout]]:
    """For each unit its part of the ranks that have one."""
    found: dict[str, list[RankLayout]] = defaultdict(list)
    for rank in layout.ranks:
        unit_of = {shard.region: roots[shard.field] for shard in rank.shards}
        regions = _by_unit((unit_of.get(region.name), region) for region in rank.regions)
        shards = _by_unit((roots[shard.field], shard) for shard in rank.shards)
        scratch = _by_unit((unit_of.get(one.region), one) for one in rank.scratch)
        inputs = _by_unit((unit_of.get(one.region), one) for one in rank.inputs)
        for root, held in shards.items():
            besides = tuple(scratch.get(root, ())), tuple(inputs.get(root, ()))
            found[root].append(RankLayout(rank.rank, tuple(regions[root]), tuple(held), *besides))
    return found


def _by_unit(pairs: Iterable[tuple[str | None, One]]) -> dict[str, list[One]]:
    found: dict[str, list[One]] = {}
    for unit, one in pairs:
        if unit is not None:
            found.setdefault(unit, []).append(one)
    return found
