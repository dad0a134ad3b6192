"""Between the contract's messages and the broker's values. Nothing else is decided here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from restow.broker.errors import LayoutFormError, PagesError
from restow.broker.layout import (
    Box,
    DType,
    Field,
    Kind,
    Layout,
    Model,
    Projection,
    RankLayout,
    Region,
    Scratch,
    Shard,
    Span,
)
from restow.broker.layout.check import check_counts
from restow.broker.layout.check_pages import MAX_AXES
from restow.broker.layout.rows import Int64s
from restow.v1 import broker_pb2, layout_pb2

MAX_BLOCKS = 1 << 20

_KINDS = {
    layout_pb2.FIELD_KIND_PER_TOKEN: Kind.PER_TOKEN,
    layout_pb2.FIELD_KIND_SNAPSHOT: Kind.SNAPSHOT,
}
_KIND_NUMBERS = {kind: number for number, kind in _KINDS.items()}


def layout_to_proto(layout: Layout) -> layout_pb2.Layout:
    """The layout as a message."""
    return layout_pb2.Layout(
        model=layout_pb2.Model(
            name=layout.model.name,
            fields=[_field_to_proto(field) for field in layout.model.fields],
            inputs=[_field_to_proto(field) for field in layout.model.inputs],
            revision=layout.model.revision,
            adapter=layout.model.adapter,
            quantisation=layout.model.quantisation,
        ),
        ranks=[_rank_to_proto(rank) for rank in layout.ranks],
    )


def _field_to_proto(field: Field) -> layout_pb2.Field:
    return layout_pb2.Field(
        name=field.name,
        kind=_KIND_NUMBERS[field.kind],
        axes=field.axes,
        shape=field.shape,
        window_tokens=field.window_tokens,
        scales=field.scales,
    )


def _rank_to_proto(rank: RankLayout) -> layout_pb2.RankLayout:
    return layout_pb2.RankLayout(
        rank=rank.rank,
        regions=[
            layout_pb2.Region(
                name=region.name,
                group=region.group,
                page_stride_bytes=region.page_stride_bytes,
                page_tokens=region.page_tokens or 0,
                pages_per_block=region.pages_per_block,
                null_block=region.null_block,
            )
            for region in rank.regions
        ],
        shards=[_shard_to_proto(shard) for shard in rank.shards],
        scratch=[
            layout_pb2.Scratch(
                region=scratch.region,
                dtype=layout_pb2.DataType.ValueType(scratch.dtype),
                offset_bytes=scratch.offset_bytes,
                sizes=scratch.sizes,
                strides_bytes=scratch.strides_bytes,
            )
            for scratch in rank.scratch
        ],
        inputs=[_shard_to_proto(shard) for shard in rank.inputs],
        projections=[
            layout_pb2.Projection(
                field=weights.field,
                box=_box_to_proto(weights.box),
                input=weights.input,
                dtype=layout_pb2.DataType.ValueType(weights.dtype),
                region=weights.region,
                offset_bytes=weights.offset_bytes,
                strides_bytes=weights.strides_bytes,
            )
            for weights in rank.projections
        ],
    )


def _shard_to_proto(shard: Shard) -> layout_pb2.Shard:
    return layout_pb2.Shard(
        field=shard.field,
        box=_box_to_proto(shard.box),
        dtype=layout_pb2.DataType.ValueType(shard.dtype),
        region=shard.region,
        offset_bytes=shard.offset_bytes,
        strides_bytes=shard.strides_bytes,
        token_stride_bytes=shard.token_stride_bytes or 0,
    )


def _box_to_proto(box: Box) -> list[layout_pb2.Span]:
    return [layout_pb2.Span(start=span.start, stop=span.stop) for span in box]


def layout_from_proto(message: layout_pb2.Layout) -> Layout:
    """The message as a layout. Raises `LayoutFormError`; `check_layout` does the rest."""
    # Empty parts are two bytes in a message, and much more as values: so count them first.
    check_counts(len(message.ranks))
    check_counts(
        len(message.ranks),
        len(message.model.fields) + len(message.model.inputs),
        sum(len(rank.regions) for rank in message.ranks),
        sum(
            len(rank.shards) + len(rank.scratch) + len(rank.inputs) + len(rank.projections)
            for rank in message.ranks
        ),
    )
    told = message.model
    fields, inputs = tuple(map(_field, told.fields)), tuple(map(_field, told.inputs))
    identity = (told.revision, told.adapter, told.quantisation)
    model = Model(told.name, fields, inputs, *identity)
    return Layout(model, tuple(_rank(rank) for rank in message.ranks))


def _field(message: layout_pb2.Field) -> Field:
    kind = _KINDS.get(message.kind)
    if kind is None or not message.name:
        raise LayoutFormError(
            f"field {message.name!r}: name and kind are needed", field=message.name
        )
    axes, shape = tuple(message.axes), tuple(message.shape)
    return Field(message.name, kind, axes, shape, message.window_tokens, message.scales)


def _rank(message: layout_pb2.RankLayout) -> RankLayout:
    return RankLayout(
        rank=message.rank,
        regions=tuple(
            Region(
                name=region.name,
                group=region.group,
                page_stride_bytes=region.page_stride_bytes,
                page_tokens=region.page_tokens or None,
                pages_per_block=region.pages_per_block or 1,
                null_block=region.null_block if region.HasField("null_block") else None,
            )
            for region in message.regions
        ),
        shards=tuple(_shard(shard, message.rank) for shard in message.shards),
        scratch=tuple(
            Scratch(
                region=scratch.region,
                dtype=_dtype(scratch.dtype, message.rank, region=scratch.region),
                offset_bytes=scratch.offset_bytes,
                sizes=tuple(scratch.sizes),
                strides_bytes=tuple(scratch.strides_bytes),
            )
            for scratch in message.scratch
        ),
        inputs=tuple(_shard(shard, message.rank) for shard in message.inputs),
        projections=tuple(
            Projection(
                field=weights.field,
                box=_box(weights.box),
                input=weights.input,
                region=weights.region,
                offset_bytes=weights.offset_bytes,
                strides_bytes=tuple(weights.strides_bytes),
                dtype=_dtype(weights.dtype, message.rank, field=weights.field),
            )
            for weights in message.projections
        ),
    )


def _box(spans: Sequence[layout_pb2.Span]) -> Box:
    if len(spans) > MAX_AXES:
        raise LayoutFormError(f"a box of {len(spans)} ranges; at most {MAX_AXES} are allowed")
    return tuple(Span(span.start, span.stop) for span in spans)


def _dtype(number: int, rank: int, **owner: str) -> DType:
    try:
        return DType(number)
    except ValueError:
        ((kind, name),) = owner.items()
        raise LayoutFormError(
            f"rank {rank}, {kind} {name}: dtype {number} is unknown", ranks=rank, **owner
        ) from None


def _shard(message: layout_pb2.Shard, rank: int) -> Shard:
    return Shard(
        field=message.field,
        box=_box(message.box),
        dtype=_dtype(message.dtype, rank, field=message.field),
        region=message.region,
        offset_bytes=message.offset_bytes,
        strides_bytes=tuple(message.strides_bytes),
        token_stride_bytes=message.token_stride_bytes or None,
    )


def block_list(
    group: str, ids: Iterable[int] | Int64s, first_block: int = 0
) -> broker_pb2.BlockList:
    """Block ids as they travel. Raises `PagesError` for ids that are no int32."""
    array = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), np.int64)
    if array.ndim != 1 or (array.size and not 0 <= array.min() <= array.max() < 2**31):
        raise PagesError(f"group {group}: block ids must be a list of int32", group=group)
    if array.size > MAX_BLOCKS:
        raise PagesError(
            f"group {group}: {array.size} block ids, at most {MAX_BLOCKS} travel in one message",
            group=group,
        )
    return broker_pb2.BlockList(
        group=group, first_block=first_block, block_ids=array.astype("<i4").tobytes()
    )


def block_lists(blocks: Mapping[str, Iterable[int] | Int64s]) -> list[broker_pb2.BlockList]:
    """All lists of one side."""
    return [block_list(group, ids) for group, ids in blocks.items()]


def blocks_from_proto(messages: Iterable[broker_pb2.BlockList]) -> dict[str, Int64s]:
    """Block ids by group, int64. Raises `PagesError` for bytes that are no int32."""
    return {message.group: ids_from_bytes(message.group, message.block_ids) for message in messages}


def ids_from_bytes(group: str, data: bytes) -> Int64s:
    """Packed little-endian int32 as int64."""
    if len(data) % 4:
        raise PagesError(f"group {group}: {len(data)} bytes are not int32 ids", group=group)
    return np.frombuffer(data, "<i4").astype(np.int64)
