"""The picture of a plan: a panel for all layers that look alike.

Pure: byte offsets, no drawing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from restow.broker.draw.explain import RankLines, holders
from restow.broker.draw.layer_pages import LayerPages, RankPages, plan_layers
from restow.broker.draw.remarks import few, remarks
from restow.broker.layout.difference import field_class
from restow.broker.planner.plan import Plan
from restow.broker.planner.table import Cutter
from restow.broker.strategy import Strategy

MAX_RANKS = 8
"""A panel shows at most this many ranks of each side."""


@dataclass(frozen=True, slots=True)
class Panel:
    """Layers that look alike. ``shown`` is the first of them, with the ranks and moves to draw.

    ``ways`` says how each class of field travels.
    """

    layers: tuple[str, ...]
    shown: LayerPages
    ways: dict[str, str]
    remarks: tuple[str, ...]

    @property
    def title(self) -> str:
        """The layers and the classes of their fields in a line."""
        count, names = len(self.layers), ", ".join(self.ways)
        if not self.layers[0].isdigit():
            return names
        return f"{count} layer{'s' * (count > 1)} ({few(self.layers)}): {names}"


@dataclass(frozen=True, slots=True)
class Picture:
    """All panels of a plan, for a prompt of ``tokens``."""

    plan: Plan
    tokens: int
    panels: tuple[Panel, ...]


def make_picture(plan: Plan, ranks: Sequence[RankLines], tokens: int) -> Picture:
    """Return the picture of a plan that ``ranks`` explain."""
    way_of = {
        (rank.dst_rank, field): line.strategy
        for rank in ranks
        for line in rank.fields
        for field in line.fields
    }
    alike: dict[object, list[LayerPages]] = defaultdict(list)
    for layer in plan_layers(plan, [rank.rebuilt for rank in ranks]):
        travels = tuple(way_of[move.dst_rank, move.field] for move in layer.moves)
        alike[layer.form(), travels].append(layer)
    cutter, replicas = Cutter(plan), (holders(plan.source.ranks), holders(plan.destination.ranks))
    panels = []
    for layers in alike.values():
        first = layers[0]
        found: dict[str, dict[str, None]] = defaultdict(dict)
        for move in first.moves:
            found[field_class(move.field)][way_of[move.dst_rank, move.field]] = None
        for move in first.rebuilt:
            found[field_class(move.field)][Strategy.RECOMPUTE.value] = None
        ways = {name: " or ".join(several) for name, several in found.items()}
        shown = _shown(first)
        said = (*remarks(layers, ways, cutter, replicas), *_left_out(first, shown))
        panels.append(Panel(tuple(layer.name for layer in layers), shown, ways, said))
    return Picture(plan, tokens, tuple(panels))


def _shown(layer: LayerPages) -> LayerPages:
    """Return the part of a layer that is drawn: no more than `MAX_RANKS` of each side.

    Ranks of D are added as long as the ranks of P that serve them all can be shown.
    """
    serving: dict[int, set[int]] = defaultdict(set)
    for move in layer.moves:
        serving[move.dst_rank].add(move.src_rank)
    needed, destination = set[int](), list[RankPages]()
    for rank in layer.destination[:MAX_RANKS]:
        if destination and len(needed | serving[rank.rank]) > MAX_RANKS:
            break
        destination.append(rank)
        needed |= serving[rank.rank]
    first = sorted(layer.source, key=lambda rank: rank.rank not in needed)[:MAX_RANKS]
    source = tuple(rank for rank in layer.source if rank in first)
    readers, sources = ({rank.rank for rank in side} for side in (destination, source))
    moves = (m for m in layer.moves if m.dst_rank in readers and m.src_rank in sources)
    return replace(layer, source=source, destination=tuple(destination), moves=tuple(moves))


def _left_out(layer: LayerPages, shown: LayerPages) -> list[str]:
    some = len(shown.source), len(shown.destination), len(shown.moves)
    every = len(layer.source), len(layer.destination), len(layer.moves)
    pairs = zip(some, every, ("ranks of P", "ranks of D", "moves"), strict=True)
    fewer = [f"{drawn:,} of the {of:,} {what}" for drawn, of, what in pairs if drawn < of]
    return [f"Only {', '.join(fewer)} are drawn."] if fewer else []
