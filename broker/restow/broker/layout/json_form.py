"""Layouts as JSON: the form of layout files and of `restow layout`.

The shape is fixed (README, "Layout files"): people's scripts read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from restow.broker.errors import LayoutFormError
from restow.broker.layout import json_values as read
from restow.broker.layout.dtype import DType
from restow.broker.layout.span import Box, Span
from restow.broker.layout.values import (
    IDENTITY_PARTS,
    Field,
    Kind,
    Layout,
    Model,
    Projection,
    RankLayout,
    Region,
    Scratch,
    Shard,
)


def layout_to_json(layout: Layout) -> dict[str, Any]:
    """The layout as plain dicts and lists."""
    model = layout.model
    fields = {field.name: field for field in (*model.fields, *model.inputs)}
    return {
        "model": {
            "name": model.name,
            **{part: value for part in IDENTITY_PARTS if (value := getattr(model, part))},
            "fields": [_field_to_json(field) for field in model.fields],
            "inputs": [_field_to_json(field) for field in model.inputs],
        },
        "ranks": [
            {
                "rank": rank.rank,
                "regions": [_region_to_json(region) for region in rank.regions],
                "shards": [_shard_to_json(shard, fields[shard.field]) for shard in rank.shards],
                "scratch": [_scratch_to_json(scratch) for scratch in rank.scratch],
                "inputs": [_shard_to_json(shard, fields[shard.field]) for shard in rank.inputs],
                "projections": [_projection_to_json(weights) for weights in rank.projections],
            }
            for rank in layout.ranks
        ],
    }


def _field_to_json(field: Field) -> dict[str, Any]:
    return {
        "field": field.name,
        "kind": field.kind.value,
        "axes": list(field.axes),
        "shape": list(field.shape),
        "window_tokens": field.window_tokens,
        "scales": field.scales,
    }


def box_to_json(box: Box) -> list[list[int]]:
    """A box as ``[[start, stop], ...]``."""
    return [[span.start, span.stop] for span in box]


def _region_to_json(region: Region) -> dict[str, Any]:
    return {
        "name": region.name,
        "group": region.group,
        "page_stride_bytes": region.page_stride_bytes,
        "page_tokens": region.page_tokens,
        "pages_per_block": region.pages_per_block,
        "null_block": region.null_block,
    }


def _shard_to_json(shard: Shard, field: Field) -> dict[str, Any]:
    return {
        "field": shard.field,
        "kind": field.kind.value,
        "axes": list(field.axes),
        "box": box_to_json(shard.box),
        "dtype": shard.dtype.label,
        "region": shard.region,
        "offset_bytes": shard.offset_bytes,
        "strides_bytes": list(shard.strides_bytes),
        "token_stride_bytes": shard.token_stride_bytes,
    }


def _scratch_to_json(scratch: Scratch) -> dict[str, Any]:
    return {
        "region": scratch.region,
        "dtype": scratch.dtype.label,
        "offset_bytes": scratch.offset_bytes,
        "sizes": list(scratch.sizes),
        "strides_bytes": list(scratch.strides_bytes),
    }


def _projection_to_json(weights: Projection) -> dict[str, Any]:
    return {
        "field": weights.field,
        "box": box_to_json(weights.box),
        "input": weights.input,
        "dtype": weights.dtype.label,
        "region": weights.region,
        "offset_bytes": weights.offset_bytes,
        "strides_bytes": list(weights.strides_bytes),
    }


def layout_from_json(data: object) -> Layout:
    """Read a layout. Raises `LayoutFormError` that names the place of what is wrong.

    Only the form is checked here; `check_layout` proves that the parts fit. A model that lists no
    fields gets those of its shards, each as large as its shards reach.
    """
    top = read.mapping(data, "layout")
    model = read.mapping(read.get(top, "model", "layout"), "model")
    ranks = read.items(read.get(top, "ranks", "layout"), "ranks")
    found: dict[str, Field] = {}
    read_by: dict[str, Field] = {}
    layouts = tuple(_rank(rank, where, found, read_by) for where, rank in ranks)
    if "fields" in model:
        listed = tuple(_field(f, where) for where, f in read.items(model["fields"], "model.fields"))
        _check_same_fields(listed, found)
    else:
        listed = tuple(found.values())
    inputs = tuple(read_by.values())
    if "inputs" in model:
        inputs = tuple(_field(f, where) for where, f in read.items(model["inputs"], "model.inputs"))
        _check_same_fields(inputs, read_by)
    name = read.name(model.get("name", ""), "model.name", least=0)
    identity = {
        part: read.name(model.get(part, ""), f"model.{part}", least=0) for part in IDENTITY_PARTS
    }
    return Layout(Model(name, listed, inputs, **identity), layouts)


def _check_same_fields(listed: tuple[Field, ...], found: Mapping[str, Field]) -> None:
    """What shards say about kind and axes is what the model says."""
    for field in listed:
        shards = found.get(field.name)
        if shards is not None and (shards.kind, shards.axes) != (field.kind, field.axes):
            raise LayoutFormError(
                f"field {field.name}: the model has {field.kind} {list(field.axes)}, its shards "
                f"{shards.kind} {list(shards.axes)}",
                place="model.fields",
                field=field.name,
            )


def _field(data: object, where: str) -> Field:
    item = read.mapping(data, where)
    return Field(
        name=read.text(item, "field", where),
        kind=_kind(item, where),
        axes=read.texts(read.get(item, "axes", where), f"{where}.axes"),
        shape=read.numbers(item, "shape", where),
        window_tokens=read.integer(item.get("window_tokens", 0), f"{where}.window_tokens"),
        scales=read.name(item.get("scales", ""), f"{where}.scales", least=0),
    )


def _rank(
    data: object, where: str, found: dict[str, Field], read_by: dict[str, Field]
) -> RankLayout:
    item = read.mapping(data, where)
    regions = read.items(read.get(item, "regions", where), f"{where}.regions")
    shards = read.items(read.get(item, "shards", where), f"{where}.shards")
    return RankLayout(
        rank=read.number(item, "rank", where),
        regions=tuple(_region(region, place) for place, region in regions),
        shards=tuple(_shard(shard, place, found) for place, shard in shards),
        scratch=tuple(
            _scratch(scratch, place)
            for place, scratch in read.items(item.get("scratch", ()), f"{where}.scratch")
        ),
        inputs=tuple(
            _shard(shard, place, read_by)
            for place, shard in read.items(item.get("inputs", ()), f"{where}.inputs")
        ),
        projections=tuple(
            _projection(weights, place)
            for place, weights in read.items(item.get("projections", ()), f"{where}.projections")
        ),
    )


def _projection(data: object, where: str) -> Projection:
    item = read.mapping(data, where)
    return Projection(
        field=read.text(item, "field", where),
        box=_box(read.get(item, "box", where), f"{where}.box"),
        input=read.text(item, "input", where),
        region=read.text(item, "region", where),
        offset_bytes=read.number(item, "offset_bytes", where),
        strides_bytes=read.numbers(item, "strides_bytes", where),
        dtype=_dtype(item, where),
    )


def _scratch(data: object, where: str) -> Scratch:
    item = read.mapping(data, where)
    return Scratch(
        region=read.text(item, "region", where),
        dtype=_dtype(item, where),
        offset_bytes=read.number(item, "offset_bytes", where),
        sizes=read.numbers(item, "sizes", where),
        strides_bytes=read.numbers(item, "strides_bytes", where),
    )


def _region(data: object, where: str) -> Region:
    item = read.mapping(data, where)
    tokens = item.get("page_tokens")
    group = item.get("group", "state" if tokens is None else "attention")
    null = item.get("null_block")
    return Region(
        name=read.text(item, "name", where),
        group="" if group == "" else read.name(group, f"{where}.group"),
        page_stride_bytes=read.number(item, "page_stride_bytes", where),
        page_tokens=None if tokens is None else read.integer(tokens, f"{where}.page_tokens"),
        pages_per_block=read.integer(item.get("pages_per_block", 1), f"{where}.pages_per_block"),
        null_block=None if null is None else read.integer(null, f"{where}.null_block"),
    )


def _shard(data: object, where: str, found: dict[str, Field]) -> Shard:
    item = read.mapping(data, where)
    token_stride = item.get("token_stride_bytes")
    shard = Shard(
        field=read.text(item, "field", where),
        box=_box(read.get(item, "box", where), f"{where}.box"),
        dtype=_dtype(item, where),
        region=read.text(item, "region", where),
        offset_bytes=read.number(item, "offset_bytes", where),
        strides_bytes=read.numbers(item, "strides_bytes", where),
        token_stride_bytes=(
            None
            if token_stride is None
            else read.integer(token_stride, f"{where}.token_stride_bytes")
        ),
    )
    axes = read.texts(read.get(item, "axes", where), f"{where}.axes")
    _add_reach(Field(shard.field, _kind(item, where), axes, ()), shard.box, where, found)
    return shard


def _add_reach(form: Field, box: Box, where: str, found: dict[str, Field]) -> None:
    """Grow the field that a shard speaks of by what the shard reaches."""
    old = found.get(form.name)
    reach = tuple(span.stop for span in box)
    if old is None:
        found[form.name] = Field(form.name, form.kind, form.axes, reach)
        return
    if (old.axes, old.kind, len(old.shape)) != (form.axes, form.kind, len(reach)):
        raise LayoutFormError(
            f"{where}: field {form.name} has other axes or another kind than before",
            place=where,
            field=form.name,
        )
    found[form.name] = Field(form.name, form.kind, form.axes, tuple(map(max, old.shape, reach)))


def _box(data: object, where: str) -> Box:
    spans = []
    for place, pair in read.items(data, where):
        numbers = read.integers(pair, place)
        if len(numbers) != 2 or not 0 <= numbers[0] < numbers[1]:
            raise read.malformed(
                place, f"{list(numbers)} is not [start, stop] with 0 <= start < stop"
            )
        spans.append(Span(*numbers))
    return tuple(spans)


def _kind(item: read.Json, where: str) -> Kind:
    text = read.text(item, "kind", where)
    try:
        return Kind(text)
    except ValueError:
        raise read.malformed(
            f"{where}.kind", f"{text!r} is neither per_token nor snapshot"
        ) from None


def _dtype(item: read.Json, where: str) -> DType:
    text = read.text(item, "dtype", where)
    try:
        return DType.parse(text)
    except LayoutFormError as error:
        raise read.malformed(f"{where}.dtype", error.message) from None
