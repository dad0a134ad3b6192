"""The picture of a plan: a panel for all layers that look alike, with remarks in sentences.

Pure: byte offsets, no drawing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from restow.broker.draw.bytes_and_seconds import size_text
from restow.broker.draw.explain import Holders, RankLines, by_way, holders
from restow.broker.draw.layer_pages import Content, LayerPages, RankPages, cut_axes, plan_layers
from restow.broker.layout.difference import field_class
from restow.broker.layout.values import ITEM_BYTES
from restow.broker.planner.costs import page_runs
from restow.broker.planner.plan import Move, Plan
from restow.broker.planner.program import Column, strided
from restow.broker.planner.table import Cutter
from restow.broker.strategy import Strategy

TIMES = "\u00d7"
_STEPS = [Column.SRC_STEP_BYTES, Column.DST_STEP_BYTES]
_TOKEN_STEPS = [Column.SRC_TOKEN_STRIDE_BYTES, Column.DST_TOKEN_STRIDE_BYTES]


def remarks(
    alike: Sequence[LayerPages],
    ways: dict[str, str],
    cutter: Cutter,
    replicas: tuple[Holders, Holders],
) -> tuple[str, ...]:
    """Return sentences about layers that look alike.

    ``ways`` says how each class of field travels, and ``replicas`` which ranks of P and of D hold
    which boxes.
    """
    layer = alike[0]
    return (
        _size(layer, ways),
        *_stages(alike),
        _pieces(layer, cutter),
        *_shared_tokens(layer),
        *_replicas(layer, *replicas),
        *_changes(layer),
    )


def few(words: Sequence[str]) -> str:
    """Return words in a line; leave the middle out if there are many.

    >>> few(["0", "2"]), few(list("01234567"))
    ('0, 2', '0, 1, 2 .. 7')
    """
    return ", ".join(words) if len(words) < 6 else f"{', '.join(words[:3])} .. {words[-1]}"


def _listed(words: Iterable[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


def _size(layer: LayerPages, ways: dict[str, str]) -> str:
    """Say how many bytes a layer has and how they travel."""
    unit = "token and layer" if any(move.per_token for move in layer.moves) else "layer"
    window = max(field.window_tokens for field in layer.fields.values())
    last = f" of the last {window:,} tokens" if window else ""
    travel = "; ".join(f"{', '.join(names)} by {way}" for way, names in by_way(ways).items())
    total = sum(move.bytes for move in layer.moves) + sum(read.bytes for read in layer.inputs)
    return f"{size_text(total)} for each {unit}{last}: {travel}."


def _stages(alike: Sequence[LayerPages]) -> Iterator[str]:
    """Say which ranks hold which layers, if pipeline stages divide them."""
    stages: dict[tuple[str, str], list[str]] = defaultdict(list)
    for layer in alike:
        source, destination = (
            few([str(rank.rank) for rank in side]) for side in (layer.source, layer.destination)
        )
        stages[source, destination].append(layer.name)
    for (source, destination), names in stages.items() if len(stages) > 1 else ():
        layers = f"Layer{'s' * (len(names) > 1)} {few(names)}"
        yield f"{layers}: from ranks {source} of P to ranks {destination} of D."


@dataclass(frozen=True, slots=True)
class PieceCount:
    """The ``count`` pieces of ``bytes`` that a layer, token or page falls into for a rank of D.

    Several ``names`` share each piece. With ``elements``, a piece is a single element, because
    P and D order the axes differently.
    """

    names: tuple[str, ...]
    bytes: int
    per: str
    elements: bool
    count: int
    sources: int


def count_pieces(cutter: Cutter, moves: Sequence[Move]) -> tuple[PieceCount, ...]:
    """Return the contiguous pieces that moves to one rank fall into, in the order of the moves.

    Tokens that follow each other on both sides are counted by the page.
    """
    table = cutter.table(moves)
    rows, pairs = table.rows, cutter.pairs
    names: dict[int, dict[str, None]] = defaultdict(dict)
    for move, row in zip(table.piece_move.tolist(), table.piece_row.tolist(), strict=True):
        names[row][field_class(moves[move].field)] = None
    items = ITEM_BYTES[rows[:, [Column.SRC_DTYPE, Column.DST_DTYPE]]]
    single = strided(rows) & (rows[:, _STEPS] != items).any(axis=1)
    counts = np.where(single, rows[:, Column.COUNT], 1)
    sizes = np.where(single, 1, rows[:, Column.COUNT]) * items[:, 0]
    runs: dict[int, list[int]] = defaultdict(list)
    for index, number in enumerate(page_runs(rows, pairs).tolist()):
        runs[number].append(index)
    rows_of: dict[tuple[tuple[str, ...], int, str, bool], list[int]] = defaultdict(list)
    for first, run in runs.items():
        size, pair, per = int(sizes[first]), pairs[int(rows[first, Column.GROUP_PAIR])], "layer"
        if pair.per_token:
            follow = pair.alike and not single[first] and (rows[first, _TOKEN_STEPS] == size).all()
            per = "page" if follow else "token"
            size *= min(pair.src.page_tokens, pair.dst.page_tokens) if follow else 1
        together = tuple(dict.fromkeys(name for index in run for name in names[index]))
        rows_of[together, size * len(run), per, bool(single[first])].append(first)
    order = {field_class(move.field): -index for index, move in enumerate(reversed(moves))}
    return tuple(
        PieceCount(
            *key, int(counts[rows_of[key]].sum()), len(set(rows[rows_of[key], Column.SRC_RANK]))
        )
        for key in sorted(rows_of, key=lambda key: (order[key[0][0]], key[1]))
    )


def _pieces(layer: LayerPages, cutter: Cutter) -> str:
    """Say into how many pieces of which size a layer falls, and why there are many."""
    moves: dict[int, list[Move]] = defaultdict(list)
    for move in layer.moves:
        moves[move.dst_rank].append(move)
    pieces = {rank: count_pieces(cutter, rank_moves) for rank, rank_moves in moves.items()}
    totals = {
        rank: sum(piece.count for piece in rank_pieces) for rank, rank_pieces in pieces.items()
    }
    most = max(totals, key=lambda rank: totals[rank])
    alike = len(set(totals.values())) == 1
    who = "each rank of D" if alike else f"rank {most} of D, which has the most pieces,"
    per: Counter[str] = Counter()
    by_reason: dict[str, list[str]] = defaultdict(list)
    for count in pieces[most]:
        per[count.per] += count.count
        times = f"{count.count:,} {TIMES} " if count.count > 1 else ""
        together = " together" if len(count.names) > 1 else ""
        size = f"{_listed(count.names)}{together} {times}{size_text(count.bytes)}"
        by_reason[_reason(layer, count, moves[most])].append(size)
    counts = _listed(f"a {unit} falls into {n:,} piece{'s' * (n > 1)}" for unit, n in per.items())
    clauses = "; ".join(", ".join(sizes) + reason for reason, sizes in by_reason.items())
    return f"For {who} {counts}: {clauses}."


def _reason(layer: LayerPages, count: PieceCount, moves: Sequence[Move]) -> str:
    """Say why the pieces of a field are many, by its largest move."""
    mine = (move for move in moves if field_class(move.field) == count.names[0])
    move = max(mine, key=lambda move: move.elements)
    axes, ends = layer.fields[count.names[0]].axes, (move.src, move.dst)
    if count.elements:
        wide = [axis for axis, span in enumerate(move.box) if span.size > 1]
        inner = [axes[min(wide, key=lambda axis: end.strides_bytes[axis])] for end in ends]
        return f" (single elements, because {inner[0]} is innermost on P and {inner[1]} on D)"
    notes = [f"from {count.sources} ranks of P"] if count.sources > 1 else []
    if count.count > count.sources and (cut := cut_axes(move.box, ends)):
        notes.insert(0, f"apart for each {_listed(axes[axis] for axis in cut)}")
    return f" ({', '.join(notes)})" if notes else ""


def _shared_tokens(layer: LayerPages) -> Iterator[str]:
    """Say which side's ranks divide the tokens of a prompt, and what that means for D."""
    moves = [move for move in layer.moves if move.per_token]
    sides = {"P": {move.src.tokens for move in moves}, "D": {move.dst.tokens for move in moves}}
    clauses = [
        f"ranks of {name} divide the tokens into {parts} parts, {run:,} in turn"
        for name, classes in sides.items()
        for parts, run in sorted({(held.parts, held.interleave_tokens) for held in classes})
        if parts > 1
    ]
    if clauses:
        alike = all(move.src.tokens == move.dst.tokens for move in moves)
        where = "pages move as pages" if alike else "each token is read from a rank that holds it"
        yield f"The {', and the '.join(clauses)}: {where}."


def _replicas(layer: LayerPages, source: Holders, destination: Holders) -> Iterator[str]:
    """Say which fields several ranks hold alike."""
    names_of: dict[tuple[int, int], list[str]] = defaultdict(list)
    for name, field in layer.fields.items():
        here, there = (max(map(len, side[field.name].values())) for side in (source, destination))
        names_of[here, there].append(name)
    for (here, there), names in names_of.items():
        if max(here, there) > 1:
            sides = [f"{here} ranks of P"] * (here > 1) + [f"{there} ranks of D"] * (there > 1)
            holding = f"{_listed(sides)} hold the same {_listed(names)}"
            yield f"{holding}: each rank of D reads one copy."


def _changes(layer: LayerPages) -> Iterator[str]:
    """Say what is cast, rebuilt and zeroed on the way."""
    casts: dict[str, dict[str, None]] = defaultdict(dict)
    for move in layer.moves:
        if move.src.dtype is not move.dst.dtype:
            cast = f"{move.src.dtype.label} to {move.dst.dtype.label}"
            casts[cast][field_class(move.field)] = None
    for cast, names in casts.items():
        yield f"Cast on the way from {cast}: {_listed(names)}."
    if layer.rebuilt:
        rebuilt = dict.fromkeys(field_class(move.field) for move in layer.rebuilt)
        most = max((read.bytes for read in layer.inputs), default=0)
        yield f"Rebuilt on D from {most:,} bytes of mixer inputs: {_listed(rebuilt)}."
    cells = (cell for rank in layer.destination for page in rank.pages for cell in page.cells)
    if any(Content.SCRATCH in (cell.content, *cell.mixed) for cell in cells):
        yield "The scratch rows of D are zeroed."


MAX_RANKS = 8
"""A panel shows at most this many ranks of each side."""


@dataclass(frozen=True, slots=True)
class Panel:
    """Layers that look alike. ``shown`` is the first layer, with the ranks and moves to draw.

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
        ways_of: dict[str, dict[str, None]] = defaultdict(dict)
        for move in first.moves:
            ways_of[field_class(move.field)][way_of[move.dst_rank, move.field]] = None
        for move in first.rebuilt:
            ways_of[field_class(move.field)][Strategy.RECOMPUTE.value] = None
        ways = {name: " or ".join(names) for name, names in ways_of.items()}
        shown = _shown(first)
        sentences = (*remarks(layers, ways, cutter, replicas), *_left_out(first, shown))
        panels.append(Panel(tuple(layer.name for layer in layers), shown, ways, sentences))
    return Picture(plan, tokens, tuple(panels))


def _shown(layer: LayerPages) -> LayerPages:
    """Return the part of a layer that is drawn: at most `MAX_RANKS` ranks of each side.

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
    drawn_counts = len(shown.source), len(shown.destination), len(shown.moves)
    all_counts = len(layer.source), len(layer.destination), len(layer.moves)
    pairs = zip(drawn_counts, all_counts, ("ranks of P", "ranks of D", "moves"), strict=True)
    fewer = [f"{drawn:,} of the {total:,} {noun}" for drawn, total, noun in pairs if drawn < total]
    return [f"Only {', '.join(fewer)} are drawn."] if fewer else []
