"""A plan as a picture: what lies where in the pages of both sides, and what goes where.

Pure: byte coordinates, no drawing. Layers that are laid out and moved alike are one panel.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from restow.broker.draw.explain import RankLines
from restow.broker.draw.layer_state import LayerState, layer_states
from restow.broker.draw.page_map import Content, Stripe, footprint, pave
from restow.broker.draw.piece_counts import PieceCount, count_pieces
from restow.broker.draw.remarks import remarks
from restow.broker.draw.ribbons import Ribbon, ribbon_of
from restow.broker.layout import Box, Field, RankLayout
from restow.broker.layout.span import overlap
from restow.broker.planner.plan import Move, Plan
from restow.broker.planner.table import Cutter
from restow.broker.strategy import Strategy

MAX_RANKS = 8
"""Of each side that a panel shows."""
MAX_FIELDS = 48
"""Of one panel that are shown: more only where one page holds many layers."""


@dataclass(frozen=True, slots=True)
class DrawnPage:
    """One page of a region. ``token_stripes``, of a page of tokens, are what its first token is."""

    region: str
    bytes: int
    tokens: int | None
    stripes: tuple[Stripe, ...]
    token_stripes: tuple[Stripe, ...] = ()

    @property
    def detail(self) -> tuple[Stripe, ...]:
        """What moves begin and end in: the page, or one token of it."""
        return self.token_stripes or self.stripes


@dataclass(frozen=True, slots=True)
class DrawnRank:
    """What a rank holds of one layer of a panel."""

    rank: int
    pages: tuple[DrawnPage, ...]
    pieces: tuple[PieceCount, ...] = ()
    """What a destination rank reads of one layer, by the size of the pieces."""


@dataclass(frozen=True, slots=True)
class StageRanks:
    """Layers whose state lies on some ranks of P and some of D."""

    layers: tuple[str, ...]
    src_ranks: tuple[int, ...]
    dst_ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Panel:
    """Layers that look alike, drawn once: those of the first stage."""

    stages: tuple[StageRanks, ...]
    classes: dict[str, str]
    """Of what is drawn by name: only where a page holds many layers do names say more."""
    ways: dict[str, str]
    """Of each class."""
    word: str
    """What it shows one of: a layer, or a page of many."""
    per_token: bool
    window_tokens: int
    bytes: int
    """Of all its layers, counting one token of per-token fields."""
    source: tuple[DrawnRank, ...]
    destination: tuple[DrawnRank, ...]
    ribbons: tuple[Ribbon, ...]
    idle: frozenset[tuple[int, str, Box]]
    """Source rank, name and box of replicas that serve nobody."""
    remarks: tuple[str, ...]
    left_out: tuple[str, ...]
    """What is drawn of how much, where that is not all."""
    shapes: dict[str, tuple[tuple[str, int], ...]]
    """Names and sizes of the axes of each field."""

    @property
    def title(self) -> str:
        """Its layers and fields in a line."""
        layers, classes = self.layers, tuple(self.ways)
        names = ", ".join(classes[:8]) + (" .." if len(classes) > 8 else "")
        if not layers[0].isdigit():
            return names
        few = len(layers) < 6
        numbers = ", ".join(layers if few else layers[:3]) + ("" if few else f" .. {layers[-1]}")
        return f"{len(layers)} layer{'' if len(layers) == 1 else 's'} ({numbers}): {names}"

    def where(self, name: str, box: Box) -> str:
        """Which part of a field a box is: the axes that it cuts."""
        cut = [
            f"{axis} [{span.start},{span.stop})"
            for span, (axis, size) in zip(box, self.shapes[name], strict=True)
            if span.size < size
        ]
        return " ".join(cut) if cut else "all of it"

    @property
    def layers(self) -> tuple[str, ...]:
        """Of all stages."""
        return tuple(layer for stage in self.stages for layer in stage.layers)


@dataclass(frozen=True, slots=True)
class Picture:
    """All that is drawn of a plan."""

    plan: Plan
    tokens: int
    panels: tuple[Panel, ...]


def make_picture(plan: Plan, ranks: Sequence[RankLines], tokens: int) -> Picture:
    """The picture of a plan as ``ranks`` explain it."""
    ways = {
        (rank.dst_rank, field): line.strategy
        for rank in ranks
        for line in rank.fields
        for field in line.fields
    }
    fields = {field.name: field for field in plan.source.model.fields}
    alike: dict[object, list[LayerState]] = defaultdict(list)
    for state in layer_states(plan, [rank.rebuilt for rank in ranks]):
        travels = tuple(ways[move.dst_rank, move.field] for move in state.moves)
        windows = tuple(fields[name].window_tokens for name in state.fields)
        alike[state.form(), windows, travels].append(state)
    cutter = Cutter(plan)
    panels = tuple(_panel(states, ways, fields, cutter) for states in alike.values())
    return Picture(plan, tokens, panels)


def _panel(
    states: Sequence[LayerState],
    ways: dict[tuple[int, str], str],
    fields: dict[str, Field],
    cutter: Cutter,
) -> Panel:
    state = states[0]
    names, classes = state.names(), state.classes()
    by_class: dict[str, dict[str, None]] = defaultdict(dict)
    by_rank: dict[int, list[Move]] = defaultdict(list)
    for move in state.moves:
        by_class[classes[move.field]][ways[move.dst_rank, move.field]] = None
        by_rank[move.dst_rank].append(move)
    pieces = {rank: count_pieces(cutter, moves, classes) for rank, moves in by_rank.items()}
    all_ways = {way for found in by_class.values() for way in found}
    for move in state.rebuilt:
        by_class[classes[move.field]][Strategy.RECOMPUTE.value] = None
    word = "read" if all_ways == {Strategy.SLICES.value} else "piece"
    shown, source, destination = _shown(state)
    stages: dict[tuple[tuple[int, ...], tuple[int, ...]], list[str]] = defaultdict(list)
    for one in states:
        sides = one.source, one.destination
        stages[_numbers(sides[0]), _numbers(sides[1])] += one.layers
    kept = {move.field for move in shown}
    return Panel(
        stages=tuple(StageRanks(tuple(layers), *key) for key, layers in stages.items()),
        classes={names[field]: classes[field] for field in state.fields},
        ways={name: " or ".join(found) for name, found in by_class.items()},
        word=state.word,
        per_token=any(move.per_token for move in state.moves),
        window_tokens=max(fields[name].window_tokens for name in state.fields),
        bytes=sum(one.bytes for one in states),
        source=tuple(_drawn(rank, names, kept) for rank in source),
        destination=tuple(
            _drawn(rank, names, kept, pieces.get(rank.rank, ())) for rank in destination
        ),
        ribbons=tuple(ribbon_of(move, names[move.field]) for move in shown),
        idle=_idle(state, names),
        remarks=remarks(state, fields, pieces, word),
        left_out=_left_out(state, len(source), len(destination), len(shown)),
        shapes={
            names[name]: tuple(zip(fields[name].axes, fields[name].shape, strict=True))
            for name in state.fields
        },
    )


def _numbers(side: Sequence[RankLayout]) -> tuple[int, ...]:
    return tuple(rank.rank for rank in side)


def _shown(state: LayerState) -> tuple[list[Move], list[RankLayout], list[RankLayout]]:
    """The moves that are drawn, and between which ranks: D's as long as all that serve them fit."""
    fields = set(state.fields[:MAX_FIELDS])
    by_rank: dict[int, list[Move]] = defaultdict(list)
    for move in state.moves:
        if move.field in fields:
            by_rank[move.dst_rank].append(move)
    destination, serving = list[RankLayout](), set[int]()
    for rank in state.destination[:MAX_RANKS]:
        needed = serving | {move.src_rank for move in by_rank[rank.rank]}
        if destination and len(needed) > MAX_RANKS:
            break
        destination.append(rank)
        serving = needed
    order = sorted(state.source, key=lambda rank: rank.rank not in serving)  # stable
    kept = set(_numbers(order[:MAX_RANKS]))
    source = [rank for rank in state.source if rank.rank in kept]
    drawn = [move for rank in destination for move in by_rank[rank.rank] if move.src_rank in kept]
    return drawn, source, destination


def _left_out(state: LayerState, sources: int, destinations: int, moves: int) -> tuple[str, ...]:
    counts = (
        (sources, len(state.source), "ranks of P"),
        (destinations, len(state.destination), "ranks of D"),
        (min(len(state.fields), MAX_FIELDS), len(state.fields), "fields"),
        (moves, len(state.moves), "moves"),
    )
    return tuple(f"{shown:,} of the {of:,} {what}" for shown, of, what in counts if shown < of)


def _idle(state: LayerState, names: dict[str, str]) -> frozenset[tuple[int, str, Box]]:
    read: dict[tuple[int, str], list[Box]] = defaultdict(list)
    for move in state.moves:
        read[move.src_rank, move.field].append(move.box)
    return frozenset(
        (rank.rank, names[shard.field], shard.box)
        for rank in state.source
        for shard in rank.shards
        if not any(overlap(box, shard.box) for box in read.get((rank.rank, shard.field), ()))
    )


def _drawn(
    rank: RankLayout, names: dict[str, str], fields: set[str], pieces: tuple[PieceCount, ...] = ()
) -> DrawnRank:
    pages = []
    for region in rank.regions:
        shards = [one for one in rank.shards if one.region == region.name]
        kept = [shard for shard in shards if shard.field in fields]
        rest = Content.REST if len(kept) < len(shards) else Content.PADDING
        tokens, size = region.page_tokens, region.page_stride_bytes
        footprints = [
            *(footprint(one, Content.STATE, names[one.field], tokens or 1) for one in kept),
            *(footprint(s, Content.SCRATCH) for s in rank.scratch if s.region == region.name),
            *(footprint(s, Content.INPUTS) for s in rank.inputs if s.region == region.name),
        ]
        token: tuple[Stripe, ...] = ()
        if tokens:
            parts = [footprint(one, Content.STATE, names[one.field]) for one in kept]
            start = min((part.start for part in parts), default=0)
            stop = max((part.stop for part in parts), default=size)
            token = pave(parts, start, stop, Content.OTHER_TOKENS)
        pages.append(DrawnPage(region.name, size, tokens, pave(footprints, 0, size, rest), token))
    return DrawnRank(rank.rank, tuple(pages), pieces)
