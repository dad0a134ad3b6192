"""The pages of a layer: what each of their bytes is on P and on D, and which moves fill D's pages.

Pure: byte offsets, no drawing. A page is a list of cells. A page of snapshots that one layer has
for itself is shown whole. Of any other page only the part of one layer and one token is shown.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate, pairwise, zip_longest

from restow.broker.layout import Box, Field, Layout, RankLayout, Region, Scratch, Shard, Span
from restow.broker.layout.difference import field_class, field_layer
from restow.broker.planner.plan import Move, Place, Plan
from restow.broker.planner.recompute import InputRead, Rebuilt

MAX_PARTS = 128
"""A box that falls into more parts than this is not taken apart further."""


class Content(StrEnum):
    """What the bytes of a cell are."""

    STATE = "state"
    """A shard, or a part of it."""
    SCRATCH = "scratch"
    """Memory for speculative tokens, which is zeroed when a state arrives."""
    INPUTS = "mixer inputs"
    """Vectors from which D can rebuild conv windows; no state."""
    PADDING = "padding"
    OTHER = "other tokens or layers"


@dataclass(frozen=True, slots=True)
class Cell:
    """The bytes ``start <= i < stop`` of a page.

    ``name`` is the class of the field and ``box`` the box of the shard, where the cell is state.
    ``mixed`` names what else lies between the first and the last byte of the cell, in turns that
    are too fine to be told apart.
    """

    start: int
    stop: int
    content: Content
    name: str = ""
    box: Box = ()
    mixed: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """The size of the cell."""
        return self.stop - self.start

    @property
    def label(self) -> str:
        """The class of the field, or what the bytes are."""
        return self.name or self.content.value


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a region, and the cells of it that are shown, in order and without gaps.

    ``tokens`` is how many tokens the page holds; None for a page of snapshots.
    """

    region: str
    bytes: int
    tokens: int | None
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class RankPages:
    """The pages in which a rank holds a layer, one page for each region."""

    rank: int
    pages: tuple[Page, ...]


@dataclass(frozen=True, slots=True)
class LayerPages:
    """The pages of a layer on all ranks that hold a part of it, and its moves.

    ``fields`` are the fields of the layer by their class. ``rebuilt`` are the moves that are spared
    because D computes their fields from ``inputs``.
    """

    name: str
    fields: dict[str, Field]
    source: tuple[RankPages, ...]
    destination: tuple[RankPages, ...]
    moves: tuple[Move, ...]
    rebuilt: tuple[Move, ...] = ()
    inputs: tuple[InputRead, ...] = ()

    def form(self) -> object:
        """Return a value that is equal for layers that look alike, on whatever ranks."""
        sides = self.source, self.destination
        src, dst = ({rank.rank: index for index, rank in enumerate(side)} for side in sides)
        pages = tuple(
            (
                index,
                page.bytes,
                page.tokens,
                cell.bytes,
                cell.content,
                cell.name,
                cell.box,
                cell.mixed,
            )
            for index, rank in enumerate((*self.source, *self.destination))
            for page in rank.pages
            for cell in page.cells
        )
        moves = tuple(
            (field_class(move.field), move.box, src[move.src_rank], dst[move.dst_rank])
            for move in (*self.moves, *self.rebuilt)
        )
        ends = tuple((end.dtype, end.tokens) for m in self.moves for end in (m.src, m.dst))
        fields = tuple((name, f.shape, f.window_tokens) for name, f in self.fields.items())
        return len(src), pages, len(self.moves), moves, ends, fields


def plan_layers(plan: Plan, rebuilt: Sequence[Rebuilt] = ()) -> tuple[LayerPages, ...]:
    """Return the layers that have moves, in the order of the model's fields.

    ``rebuilt`` is what the ranks of D compute themselves. A field that belongs to no layer stands
    by itself. Fields of drafts that only one side has are left out, because they do not move.
    """
    wanted = {field.name for field in plan.destination.model.fields} - plan.cold
    fields: dict[str, dict[str, Field]] = defaultdict(dict)
    for field in plan.source.model.fields:
        if field.name in wanted:
            fields[_layer(field.name)][field_class(field.name)] = field
    spared = {move for rank_rebuilt in rebuilt for move in rank_rebuilt.moves}
    moves: dict[tuple[str, bool], list[Move]] = defaultdict(list)
    for move in plan.moves:
        moves[_layer(move.field), move in spared].append(move)
    inputs: dict[str, list[InputRead]] = defaultdict(list)
    for read in (read for rank_rebuilt in rebuilt for read in rank_rebuilt.inputs):
        inputs[_layer(read.shard.field)].append(read)
    source, destination = (_pages(side, wanted) for side in (plan.source, plan.destination))
    return tuple(
        LayerPages(
            field_layer(next(iter(layer_fields.values())).name) or name,
            layer_fields,
            tuple(source[name]),
            tuple(destination[name]),
            tuple(moves[name, False]),
            tuple(moves[name, True]),
            tuple(inputs[name]),
        )
        for name, layer_fields in fields.items()
        if moves[name, False]
    )


def _layer(field: str) -> str:
    """Return what the fields of one layer have in common: ``layers.7.`` of ``layers.7.k``."""
    return field.removesuffix(field_class(field)) or field


def _pages(layout: Layout, wanted: set[str]) -> dict[str, list[RankPages]]:
    """Return the pages of every layer, for each rank that holds a part of it."""
    pages_of: dict[str, list[RankPages]] = defaultdict(list)
    for rank in layout.ranks:
        shards: dict[str, dict[str, list[Shard]]] = defaultdict(lambda: defaultdict(list))
        for shard in rank.shards:
            shards[shard.region][_layer(shard.field)].append(shard)
        pages: dict[str, list[Page]] = defaultdict(list)
        for region in rank.regions:
            layers = shards[region.name]
            whole = not region.page_tokens and len(layers) == 1
            for name, layer_shards in layers.items():
                if own := [shard for shard in layer_shards if shard.field in wanted]:
                    pages[name].append(_page(rank, region, own, whole))
        for name, layer_pages in pages.items():
            pages_of[name].append(RankPages(rank.rank, tuple(layer_pages)))
    return pages_of


def _page(rank: RankLayout, region: Region, shards: Sequence[Shard], whole: bool) -> Page:
    """Return the page ``whole``, or from the first to the last byte of ``shards``."""
    own = [c for held in shards for c in _cells(held, Content.STATE, field_class(held.field))]
    at, end, gap = min(c.start for c in own), max(c.stop for c in own), Content.OTHER
    if whole:
        at, end, gap = 0, region.page_stride_bytes, Content.PADDING
        beside: list[Shard | Scratch] = [*rank.scratch, *rank.inputs]
        for held in (memory for memory in beside if memory.region == region.name):
            content = Content.SCRATCH if isinstance(held, Scratch) else Content.INPUTS
            own += _cells(held, content)
    cells: list[Cell] = []
    for cell in _apart(own):
        cells += [Cell(at, cell.start, gap)] * (at < cell.start) + [cell]
        at = cell.stop
    cells += [Cell(at, end, gap)] * (at < end)
    return Page(region.name, region.page_stride_bytes, region.page_tokens, tuple(cells))


def _cells(held: Shard | Scratch, content: Content, name: str = "") -> list[Cell]:
    """Return the runs of bytes that a shard or scratch memory covers, for one token of a page.

    Too many runs become a single mixed cell from the first byte to the last.
    """
    box = held.box if isinstance(held, Shard) else tuple(Span(0, size) for size in held.sizes)
    axes = cut_axes(box, (held,))
    whole, parts = math.prod(box[axis].size for axis in axes), box_parts(box, axes)
    gaps = ("gaps",) if len(parts) < whole else ()
    runs = [reach(part, box, held) for part in ([box] if gaps else parts)]
    return [Cell(run.start, run.stop, content, name, box if name else (), gaps) for run in runs]


def _apart(cells: Sequence[Cell]) -> Iterator[Cell]:
    """Yield the cells in order, and mixed cells where they overlap each other.

    A mixed cell reaches from where a shard begins to where the next shard begins.
    """
    cells = sorted(cells, key=lambda cell: cell.start)
    if all(before.stop <= cell.start for before, cell in pairwise(cells)):
        yield from cells
        return
    reached = [*accumulate((cell.stop for cell in cells), max)]
    heads = [
        index
        for index, cell in enumerate(cells)
        if not index or cell.content is Content.STATE or reached[index - 1] <= cell.start
    ]
    for index, after in zip_longest(heads, heads[1:]):
        cell, last = cells[index], reached[after - 1 if after else -1]
        stop = min(last, cells[after].start) if after else last
        inside = (c for c in cells if c is not cell and c.start < stop and c.stop > cell.start)
        labels = tuple(dict.fromkeys(c.label for c in inside))
        if cell.start < stop:
            yield replace(cell, stop=stop, mixed=labels or cell.mixed)


def cut_axes(box: Box, places: Sequence[Shard | Scratch | Place]) -> tuple[int, ...]:
    """Return the axes along which a box has to be cut to leave one run of bytes at every place.

    The outermost axis of the first place comes first.
    """
    runs = [place.dtype.itemsize_bytes for place in places]
    axes = [axis for axis, span in enumerate(box) if span.size > 1]
    axes.sort(key=lambda axis: -places[0].strides_bytes[axis])
    while axes and runs == [place.strides_bytes[axes[-1]] for place in places]:
        size = box[axes.pop()].size
        runs = [run * size for run in runs]
    return tuple(axes)


def strands(move: Move) -> list[tuple[Span, Span]]:
    """Return the bytes of a move on P and on D, in parts that are runs on both sides if possible.

    For a per-token field, the bytes are those of the first token of a page.
    """
    src, dst = move.src, move.dst
    parts = box_parts(move.box, cut_axes(move.box, (src, dst)))
    return [(reach(part, move.box, src), reach(part, move.box, dst)) for part in parts]


def box_parts(box: Box, axes: Sequence[int]) -> list[Box]:
    """Return a box cut along the axes, outermost first, as far as `MAX_PARTS` allows."""
    parts = [box]
    for axis in axes:
        if len(parts) * box[axis].size <= MAX_PARTS:
            steps = [Span(at, at + 1) for at in range(box[axis].start, box[axis].stop)]
            parts = [(*part[:axis], step, *part[axis + 1 :]) for part in parts for step in steps]
    return parts


def reach(part: Box, box: Box, place: Shard | Scratch | Place) -> Span:
    """Return the bytes from the first to the last of ``part``, where ``box`` lies at ``place``."""
    start = stop = place.offset_bytes
    for span, whole, step in zip(part, box, place.strides_bytes, strict=True):
        start += (span.start - whole.start) * step
        stop += (span.stop - 1 - whole.start) * step
    return Span(start, stop + place.dtype.itemsize_bytes)
