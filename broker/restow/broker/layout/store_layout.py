"""The layout of a store, packed without gaps in the order of an engine's page.

Fields that an engine interleaves stay interleaved: keys and values of a head and token side by
side, or the channels of several fields in a row of taps. Copies between a store and an engine of a
single rank therefore have the longest possible pieces.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from restow.broker.errors import LayoutFormError
from restow.broker.layout import (
    Field,
    Kind,
    Layout,
    RankLayout,
    Region,
    Shard,
    Span,
)
from restow.broker.layout.span import aligned

TOKEN = ""
"""The name of the token axis; no other axis has an empty name."""


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of a field: its whole size, and size and stride of an engine's part of it."""

    name: str
    size: int
    held: int
    stride_bytes: int


@dataclass(frozen=True, slots=True)
class Part:
    """A field in an engine's page; ``axes`` are ordered from the outermost to the innermost."""

    field: str
    item_bytes: int
    offset_bytes: int
    axes: tuple[Axis, ...]

    @property
    def stop_bytes(self) -> int:
        """Return the end of the last element."""
        reach = sum((axis.held - 1) * axis.stride_bytes for axis in self.axes)
        return self.offset_bytes + reach + self.item_bytes


@dataclass(frozen=True, slots=True)
class FieldPlace:
    """The place of a whole field: its offset, and the stride of each axis by name."""

    offset_bytes: int
    strides_bytes: dict[str, int]


def pack(parts: Sequence[Part]) -> tuple[dict[str, FieldPlace], int]:
    """Return the place of each field, and the bytes of all fields together.

    >>> head, token = Axis("head", 2, 2, 64), Axis(TOKEN, 4, 4, 16)
    >>> k = Part("k", 2, 0, (head, token, Axis("dim", 4, 4, 2)))
    >>> places, size = pack([k, replace(k, field="v", offset_bytes=8)])
    >>> places["v"].offset_bytes, places["v"].strides_bytes, size
    (8, {'dim': 2, '': 16, 'head': 64}, 128)
    """
    places: dict[str, FieldPlace] = {}
    end = 0
    for overlapping in _interleaved(parts):
        packed, size = _pack_together(overlapping)
        for field, place in packed.items():
            places[field] = replace(place, offset_bytes=end + place.offset_bytes)
        end += size
    return places, end


def _interleaved(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """Yield lists of parts whose byte ranges overlap, in the order of their offsets."""
    overlapping: list[Part] = []
    for part in sorted(parts, key=lambda part: (part.offset_bytes, part.stop_bytes)):
        if overlapping and part.offset_bytes >= max(known.stop_bytes for known in overlapping):
            yield overlapping
            overlapping = []
        overlapping.append(part)
    if overlapping:
        yield overlapping


def _pack_together(parts: list[Part]) -> tuple[dict[str, FieldPlace], int]:
    """Pack interleaved parts: along a common outermost axis if they have it, otherwise apart."""
    if len(parts) == 1:
        return _pack_alone(parts[0])
    outermost = {part.axes[:1] for part in parts}
    if len(outermost) > 1 or not parts[0].axes:
        places: dict[str, FieldPlace] = {}
        end = 0
        for part in parts:
            packed, size = _pack_alone(part)
            places[part.field] = replace(packed[part.field], offset_bytes=end)
            end += size
        return places, end
    axis = parts[0].axes[0]
    inner, size = pack([replace(part, axes=part.axes[1:]) for part in parts])
    for place in inner.values():
        place.strides_bytes[axis.name] = size
    return inner, size * axis.size


def _pack_alone(part: Part) -> tuple[dict[str, FieldPlace], int]:
    strides, size = {}, part.item_bytes
    for axis in reversed(part.axes):
        strides[axis.name] = size
        size *= axis.size
    return {part.field: FieldPlace(0, strides)}, size


SNAPSHOTS = "snapshots"
"""The group of snapshots."""
TOKENS = "tokens"
"""The group of fields that keep all tokens; groups of windows add a dot and the window."""
NULL_BLOCK = 0
"""The id that stands for a block that a window no longer has."""
ALIGN_BYTES = 64
"""Alignment of pages, and of the part from each region of the engine."""


def least_block_tokens(layout: Layout) -> int:
    """Return a store's default block size in tokens: the smallest block of the engine.

    With windows, it divides all of their blocks, so that the engine has every block of the store
    from its beginning. Returns 1 if no field has tokens.
    """
    windows = {field.name for field in layout.model.fields if field.window_tokens}
    held = [(s.field, region.block_tokens) for rank in layout.ranks for region, s in rank.held()]
    least = min((tokens for _, tokens in held if tokens), default=1)
    divisor = math.gcd(*(tokens for field, tokens in held if field in windows))
    return math.gcd(least, divisor) if divisor else least


def store_layout(layout: Layout, block_tokens: int | None = None) -> Layout:
    """Return the layout of a store: a single rank with every field whole, in pages without gaps.

    A page has the tokens of a block, for all layers. Windows of each length, and snapshots, have
    pages of their own. Blocks of windows are whole, because states with the same beginning share
    them. The order inside a page follows ``layout``, an engine's layout. Its model is taken over
    without inputs, which are no state. If ``block_tokens`` is None, `least_block_tokens` applies.
    Raises `LayoutFormError`.
    """
    block_tokens = least_block_tokens(layout) if block_tokens is None else block_tokens
    if block_tokens < 1:
        raise LayoutFormError(f"block_tokens is {block_tokens}; it must be at least 1")
    fields = {field.name: field for field in layout.model.fields}
    shard_of: dict[str, Shard] = {}
    sources: dict[str, dict[tuple[int, str], list[Part]]] = defaultdict(lambda: defaultdict(list))
    for rank in layout.ranks:
        for region, shard in rank.held():
            if shard.field not in shard_of:
                shard_of[shard.field] = shard
                field = fields[shard.field]
                part = _part(field, shard, region, block_tokens)
                sources[_group(field)][rank.rank, region.name].append(part)
    regions, shards = [], []
    for group, by_region in sources.items():
        end = 0
        for parts in by_region.values():
            places, size = pack(parts)
            for name, place in places.items():
                field, strides = fields[name], place.strides_bytes
                shards.append(
                    Shard(
                        name,
                        tuple(Span(0, axis) for axis in field.shape),
                        shard_of[name].dtype,
                        group,
                        end + place.offset_bytes,
                        tuple(strides[axis] for axis in field.axes),
                        strides.get(TOKEN),
                    )
                )
            end = aligned(end + size, ALIGN_BYTES)
        tokens = None if group == SNAPSHOTS else block_tokens
        regions.append(
            Region(group, group, end, tokens, null_block=NULL_BLOCK, whole_blocks=bool(tokens))
        )
    return Layout(replace(layout.model, inputs=()), (RankLayout(0, tuple(regions), tuple(shards)),))


def _group(field: Field) -> str:
    if field.kind is Kind.SNAPSHOT:
        return SNAPSHOTS
    return f"{TOKENS}.{field.window_tokens}" if field.window_tokens else TOKENS


def _part(field: Field, shard: Shard, region: Region, block_tokens: int) -> Part:
    axes = [
        Axis(name, size, span.size, stride)
        for name, size, span, stride in zip(
            field.axes, field.shape, shard.box, shard.strides_bytes, strict=True
        )
    ]
    if shard.token_stride_bytes is not None:
        tokens = region.page_tokens or 1
        axes.append(Axis(TOKEN, block_tokens, tokens, shard.token_stride_bytes))
    # If two axes have the same stride, the axis of which the rank holds one element lies inside.
    axes.sort(key=lambda axis: (-axis.stride_bytes, -axis.held))
    return Part(field.name, shard.dtype.itemsize_bytes, shard.offset_bytes, tuple(axes))
