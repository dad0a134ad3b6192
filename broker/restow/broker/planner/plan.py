"""Plans: intersect the boxes of two layouts into moves that fill every destination shard."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from restow.broker.errors import (
    BlockTokensMismatchError,
    CastUnsupportedError,
    ModelMismatchError,
    PlanError,
    ScalesMismatchError,
    TooManyPiecesError,
)
from restow.broker.layout import (
    ALL_TOKENS,
    Box,
    DType,
    Field,
    Layout,
    Shard,
    TokenClass,
)
from restow.broker.layout.span import overlap, volume
from restow.broker.layout.token_class import count_shared
from restow.broker.words import Worded


@dataclass(frozen=True, slots=True)
class Place(Worded):
    """The place of a box inside a page: offset, strides, and the tokens held there."""

    region: str
    offset_bytes: int
    strides_bytes: tuple[int, ...]
    token_stride_bytes: int | None
    dtype: DType
    tokens: TokenClass = ALL_TOKENS

    @classmethod
    def of(cls, shard: Shard, box: Box, tokens: TokenClass = ALL_TOKENS) -> Place:
        """Return the place of ``box``, which lies inside the shard's box."""
        shift = sum(
            (span.start - held.start) * stride
            for span, held, stride in zip(box, shard.box, shard.strides_bytes, strict=True)
        )
        return cls(
            shard.region,
            shard.offset_bytes + shift,
            shard.strides_bytes,
            shard.token_stride_bytes,
            shard.dtype,
            tokens,
        )


@dataclass(frozen=True, slots=True)
class Move:
    """A copy of ``box`` of ``field``, in global coordinates, from a rank's page to another page.

    A move of a per-token field copies the tokens that both places hold.
    """

    field: str
    src_rank: int
    dst_rank: int
    box: Box
    src: Place
    dst: Place

    @property
    def elements(self) -> int:
        """Return the number of elements moved, per token if the field is per-token."""
        return volume(self.box)

    @property
    def bytes(self) -> int:
        """Return the source bytes read, per token if the field is per-token."""
        return self.elements * self.src.dtype.itemsize_bytes

    def entries(self, count: int, tokens: int) -> int:
        """Return how many of the last ``count`` entries it moves, in a handoff of ``tokens``."""
        if not self.per_token:
            return count
        return count_shared(self.src.tokens, self.dst.tokens, tokens - count, tokens)

    @property
    def per_token(self) -> bool:
        """Return whether the move repeats for every token."""
        return self.src.token_stride_bytes is not None


MAX_PAIRS_OF_BOXES = 1 << 23
"""Limit for the pairs of boxes compared in a plan: enough for 1,024 ranks on both sides."""


@dataclass(frozen=True, slots=True)
class Plan:
    """All moves that fill ``destination`` from ``source``, for every rank.

    Law *cover*: every element of every destination shard is written by exactly one move.

    Law *minimality*: the moves' boxes add up to the destination's shards, and each is read from a
    single source, however many ranks hold it.

    ``cold`` names D's fields that are zeroed in place: fields of drafts that P lacks.
    """

    source: Layout
    destination: Layout
    moves: tuple[Move, ...]
    cold: frozenset[str] = frozenset()

    @property
    def bytes(self) -> int:
        """Return the bytes of all moves, counting a single token of each per-token move."""
        return sum(move.bytes for move in self.moves)

    def bytes_at(self, tokens: int) -> int:
        """Return the bytes read for a prompt of ``tokens``."""
        entries = self.entries(tokens)
        return sum(move.bytes * move.entries(entries[move.field], tokens) for move in self.moves)

    def entries(self, tokens: int) -> dict[str, int]:
        """Return how many entries of each field a handoff of ``tokens`` moves."""
        blocks = {
            shard.field: region.block_tokens
            for rank in self.destination.ranks
            for region, shard in rank.held()
            if region.whole_blocks
        }
        return {
            field.name: field.entries(tokens, blocks.get(field.name, 1))
            for field in self.source.model.fields
        }


def make_plan(source: Layout, destination: Layout, *, any_revision: bool = False) -> Plan:
    """Plan from a checked layout to another.

    With ``any_revision`` the weights may differ, because they are compared for each handoff. Raises
    `ModelMismatchError` if the models differ, `ScalesMismatchError` if the same bytes would be
    other values, `CastUnsupportedError` if no cast exists for a field, `BlockTokensMismatchError`
    if D keeps whole blocks of which P may lack a part, `TooManyPiecesError` for layouts that are
    cut too finely, and `PlanError` if the plan does not cover the destination (which `check_layout`
    rules out).
    """
    check_same_model(source, destination, any_revision)
    check_whole_blocks(source, destination)
    cold = cold_fields(source, destination)
    held, wanted = _holders(source), _holders(destination, cold)
    by_form: dict[object, Routes] = {}  # layers of the same kind have the same routes
    routes: dict[str, Routes] = {}
    pairs_of_boxes = 0
    for name, boxes in wanted.items():
        form = held.get(name, ()), boxes
        known = by_form.get(form)
        if known is None:
            pairs_of_boxes += len(form[0]) * len(boxes)
            if pairs_of_boxes > MAX_PAIRS_OF_BOXES:
                raise TooManyPiecesError(
                    f"more than {MAX_PAIRS_OF_BOXES} pairs of boxes would have to be compared",
                    field=name,
                )
            known = by_form[form] = _routes(name, *form)
        routes[name] = known
    shards = {
        (rank.rank, shard.field, shard.box): shard for rank in source.ranks for shard in rank.shards
    }
    moves = tuple(
        _move(
            route,
            shards[route.src_rank, shard.field, route.held],
            rank.rank,
            shard,
            region.tokens,
        )
        for rank in destination.ranks
        for region, shard in rank.held()
        if shard.field not in cold
        for route in routes[shard.field][rank.rank, shard.box]
    )
    return Plan(source, destination, moves, cold)


def cold_fields(source: Layout, destination: Layout) -> frozenset[str]:
    """Return D's fields that P lacks or has in another form: fields of drafts."""
    held = set(source.model.fields)
    return frozenset(field.name for field in destination.model.fields if field not in held)


def _move(route: Route, src: Shard, dst_rank: int, dst: Shard, tokens: TokenClass) -> Move:
    if src.dtype is not dst.dtype and not (src.dtype.castable and dst.dtype.castable):
        raise CastUnsupportedError(
            f"field {dst.field}: rank {route.src_rank} of P holds {src.dtype.label}, but rank "
            f"{dst_rank} of D wants {dst.dtype.label}, and no cast exists: run both engines with "
            f"one type of this cache",
            field=dst.field,
            ranks=f"{route.src_rank},{dst_rank}",
        )
    box = route.box
    places = Place.of(src, box, route.tokens), Place.of(dst, box, tokens)
    return Move(dst.field, route.src_rank, dst_rank, box, *places)


def check_same_model(source: Layout, destination: Layout, any_revision: bool = False) -> None:
    """Raise `ModelMismatchError` or `ScalesMismatchError` for the first difference.

    Only inputs that both models list must be equal. Fields of drafts may differ, and with
    ``any_revision`` the weights may differ too.
    """
    ours, theirs = source.model, destination.model
    if any_revision:
        theirs = replace(theirs, revision=ours.revision)
    if ours.identity != theirs.identity:
        raise ModelMismatchError(
            f"P serves model {ours.identity}, but D serves {theirs.identity}: states of different "
            f"models or weights are not interchangeable. Run both engines from one checkpoint; if "
            f"they do, give both the same revision",
            source=ours.identity,
            destination=theirs.identity,
        )
    p_fields = {field.name: field for field in ours.fields}
    d_fields = {field.name: field for field in theirs.fields}
    for name in sorted(p_fields.keys() | d_fields.keys()):
        p_field, d_field = p_fields.get(name), d_fields.get(name)
        if p_field == d_field or not any(field and not field.draft for field in (p_field, d_field)):
            continue
        if p_field and d_field and p_field == replace(d_field, scales=p_field.scales):
            raise ScalesMismatchError(
                f"model {ours.name!r}, field {name}: P's elements have {_scales(p_field)}, "
                f"D's have {_scales(d_field)}: the same bytes would be other values, and nothing "
                f"rescales them in transit. Run both engines with one type of this cache and the "
                f"same scales",
                field=name,
                source=p_field.scales,
                destination=d_field.scales,
            )
        raise ModelMismatchError(
            f"model {ours.name!r}, field {name}: P has {_describe(p_field)}, "
            f"D has {_describe(d_field)}",
            field=name,
        )
    inputs, read = ({field.name: field for field in model.inputs} for model in (ours, theirs))
    for name in sorted(inputs.keys() & read.keys()):
        if inputs[name] != read[name]:
            raise ModelMismatchError(
                f"model {ours.name!r}, input {name}: P has {_describe(inputs[name])}, "
                f"D has {_describe(read[name])}",
                field=name,
            )


def _describe(field: Field | None) -> str:
    if field is None:
        return "none"
    sizes = (f"{axis} {size}" for axis, size in zip(field.axes, field.shape, strict=True))
    window = [f"a window of {field.window_tokens} tokens"] if field.window_tokens else []
    scales = [_scales(field)] if field.scales else []
    draft = [f"of the draft {field.draft!r}"] if field.draft else []
    return ", ".join([field.kind.value, *sizes, *window, *scales, *draft])


def _scales(field: Field) -> str:
    return f"scales {field.scales!r}" if field.scales else "no scales"


Held: TypeAlias = tuple[tuple[tuple[Box, TokenClass], tuple[int, ...]], ...]
"""The distinct boxes and tokens of a field, with the ranks that hold each box."""


@dataclass(frozen=True, slots=True)
class Route:
    """The source of ``box``: the shard of ``src_rank`` with ``tokens`` of the box ``held``."""

    box: Box
    src_rank: int
    held: Box
    tokens: TokenClass


Routes: TypeAlias = dict[tuple[int, Box], list[Route]]
"""The sources of the parts, for each destination rank and each box that it wants."""


def _holders(layout: Layout, without: frozenset[str] = frozenset()) -> dict[str, Held]:
    ranks_of: dict[str, dict[tuple[Box, TokenClass], list[int]]]
    ranks_of = defaultdict(lambda: defaultdict(list))
    for rank in layout.ranks:
        for region, shard in rank.held():
            ranks_of[shard.field][shard.box, region.tokens].append(rank.rank)
    return {
        name: tuple((part, tuple(sorted(ranks))) for part, ranks in parts.items())
        for name, parts in ranks_of.items()
        if name not in without
    }


def _routes(field: str, held: Held, wanted: Held) -> Routes:
    """Tile every wanted box with parts of held boxes; the readers of a part share its replicas."""
    routes: Routes = defaultdict(list)
    for (held_box, tokens), src_ranks in held:
        parts = [
            (common, dst_rank, box)
            for (box, needed), dst_ranks in wanted
            if (common := overlap(held_box, box)) is not None and tokens.shared(needed)
            for dst_rank in dst_ranks
        ]
        readers = sorted({dst_rank for _, dst_rank, _ in parts})
        number = {dst_rank: index for index, dst_rank in enumerate(readers)}
        for common, dst_rank, box in parts:
            src_rank = spread(src_ranks, number[dst_rank], len(readers))
            routes[dst_rank, box].append(Route(common, src_rank, held_box, tokens))
    _check_tiled(field, routes, wanted)
    return routes


def spread(replicas: Sequence[int], reader: int, readers: int) -> int:
    """Return the replica for the ``reader``-th of the ranks that read a box.

    Neighbouring readers read from neighbouring replicas: no replica serves more than its share, and
    at equal TP each rank reads from its own counterpart.
    """
    return replicas[reader * len(replicas) // readers]


def _check_tiled(field: str, routes: Routes, wanted: Held) -> None:
    """Check that the parts of each wanted box, which are disjoint, add up to its volume."""
    for (box, tokens), dst_ranks in wanted:
        needed = volume(box) * tokens.shared(tokens)
        for dst_rank in dst_ranks:
            covered = sum(
                volume(route.box) * route.tokens.shared(tokens) for route in routes[dst_rank, box]
            )
            if covered != needed:
                raise PlanError(
                    f"field {field}: the source holds {covered} of the {needed} elements "
                    f"that destination rank {dst_rank} needs",
                    field=field,
                    ranks=dst_rank,
                )


def check_whole_blocks(source: Layout, destination: Layout) -> None:
    """Raise `BlockTokensMismatchError` unless a block of P begins where each block of D begins.

    P frees the blocks that lie wholly before a window, and still has the block in which the window
    begins. D's block of that token must not begin before P's.
    """
    windows = {field.name for field in source.model.fields if field.window_tokens}
    held, wanted = (
        {
            (shard.field, region.block_tokens)
            for rank in layout.ranks
            for region, shard in rank.held()
            if shard.field in windows and (layout is source or region.whole_blocks)
        }
        for layout in (source, destination)
    )
    for field, theirs in sorted(wanted):
        for ours in sorted(tokens for name, tokens in held if name == field):
            if ours % theirs:
                raise BlockTokensMismatchError(
                    f"field {field}: D keeps whole blocks of {theirs} tokens for other prompts, "
                    f"but P frees blocks of {ours} tokens before a window, which is no multiple: "
                    f"P may lack the beginning of D's block. Give D blocks that divide P's, or "
                    f"disable prefix caching in D (vLLM: --no-enable-prefix-caching)",
                    field=field,
                    source=ours,
                    destination=theirs,
                )
