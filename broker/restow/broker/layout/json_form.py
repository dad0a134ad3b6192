"""Layouts as JSON: the form of layout files and of `restow layout`.

The shape is fixed (README, "Layout files"): people's scripts read it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from restow.broker.errors import LayoutFormError
from restow.broker.layout.dtype import DType
from restow.broker.layout.span import Box, Span
from restow.broker.layout.values import (
    Field,
    Kind,
    Layout,
    Model,
    RankLayout,
    Region,
    Scratch,
    Shard,
)

Json = Mapping[str, Any]


def layout_to_json(layout: Layout) -> dict[str, Any]:
    """The layout as plain dicts and lists."""
    fields = {field.name: field for field in layout.model.fields}
    return {
        "model": {
            "name": layout.model.name,
            "fields": [
                {
                    "field": f.name,
                    "kind": f.kind.value,
                    "axes": list(f.axes),
                    "shape": list(f.shape),
                    "window_tokens": f.window_tokens,
                    "scales": f.scales,
                }
                for f in layout.model.fields
            ],
        },
        "ranks": [
            {
                "rank": rank.rank,
                "regions": [_region_to_json(region) for region in rank.regions],
                "shards": [_shard_to_json(shard, fields[shard.field]) for shard in rank.shards],
                "scratch": [_scratch_to_json(scratch) for scratch in rank.scratch],
            }
            for rank in layout.ranks
        ],
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


def layout_from_json(data: object) -> Layout:
    """Read a layout. Raises `LayoutFormError` that names the place of what is wrong.

    Only the form is checked here; `check_layout` proves that the parts fit. A model that lists no
    fields gets those of its shards, each as large as its shards reach.
    """
    top = _mapping(data, "layout")
    model = _mapping(_get(top, "model", "layout"), "model")
    ranks = _items(_get(top, "ranks", "layout"), "ranks")
    found: dict[str, Field] = {}
    layouts = tuple(_rank(rank, where, found) for where, rank in ranks)
    if "fields" in model:
        listed = tuple(_field(f, where) for where, f in _items(model["fields"], "model.fields"))
        _check_same_fields(listed, found)
    else:
        listed = tuple(found.values())
    name = _text(model, "name", "model") if "name" in model else ""
    return Layout(Model(name, listed), layouts)


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
    item = _mapping(data, where)
    return Field(
        name=_text(item, "field", where),
        kind=_kind(item, where),
        axes=_texts(_get(item, "axes", where), f"{where}.axes"),
        shape=_ints(_get(item, "shape", where), f"{where}.shape"),
        window_tokens=_int(item.get("window_tokens", 0), f"{where}.window_tokens"),
        scales=_name(item.get("scales", ""), f"{where}.scales", least=0),
    )


def _rank(data: object, where: str, found: dict[str, Field]) -> RankLayout:
    item = _mapping(data, where)
    regions = _items(_get(item, "regions", where), f"{where}.regions")
    shards = _items(_get(item, "shards", where), f"{where}.shards")
    return RankLayout(
        rank=_int(_get(item, "rank", where), f"{where}.rank"),
        regions=tuple(_region(region, place) for place, region in regions),
        shards=tuple(_shard(shard, place, found) for place, shard in shards),
        scratch=tuple(
            _scratch(scratch, place)
            for place, scratch in _items(item.get("scratch", ()), f"{where}.scratch")
        ),
    )


def _scratch(data: object, where: str) -> Scratch:
    item = _mapping(data, where)
    return Scratch(
        region=_text(item, "region", where),
        dtype=_dtype(item, where),
        offset_bytes=_int(_get(item, "offset_bytes", where), f"{where}.offset_bytes"),
        sizes=_ints(_get(item, "sizes", where), f"{where}.sizes"),
        strides_bytes=_ints(_get(item, "strides_bytes", where), f"{where}.strides_bytes"),
    )


def _region(data: object, where: str) -> Region:
    item = _mapping(data, where)
    tokens = item.get("page_tokens")
    default_group = "state" if tokens is None else "attention"
    return Region(
        name=_text(item, "name", where),
        group=_text(item, "group", where) if "group" in item else default_group,
        page_stride_bytes=_int(
            _get(item, "page_stride_bytes", where), f"{where}.page_stride_bytes"
        ),
        page_tokens=None if tokens is None else _int(tokens, f"{where}.page_tokens"),
        pages_per_block=_int(item.get("pages_per_block", 1), f"{where}.pages_per_block"),
    )


def _shard(data: object, where: str, found: dict[str, Field]) -> Shard:
    item = _mapping(data, where)
    token_stride = item.get("token_stride_bytes")
    shard = Shard(
        field=_text(item, "field", where),
        box=_box(_get(item, "box", where), f"{where}.box"),
        dtype=_dtype(item, where),
        region=_text(item, "region", where),
        offset_bytes=_int(_get(item, "offset_bytes", where), f"{where}.offset_bytes"),
        strides_bytes=_ints(_get(item, "strides_bytes", where), f"{where}.strides_bytes"),
        token_stride_bytes=(
            None if token_stride is None else _int(token_stride, f"{where}.token_stride_bytes")
        ),
    )
    axes = _texts(_get(item, "axes", where), f"{where}.axes")
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
    for place, pair in _items(data, where):
        numbers = _ints(pair, place)
        if len(numbers) != 2 or not 0 <= numbers[0] < numbers[1]:
            raise _malformed(place, f"{list(numbers)} is not [start, stop] with 0 <= start < stop")
        spans.append(Span(*numbers))
    return tuple(spans)


def _kind(item: Json, where: str) -> Kind:
    text = _text(item, "kind", where)
    try:
        return Kind(text)
    except ValueError:
        raise _malformed(f"{where}.kind", f"{text!r} is neither per_token nor snapshot") from None


def _dtype(item: Json, where: str) -> DType:
    text = _text(item, "dtype", where)
    try:
        return DType.parse(text)
    except LayoutFormError as error:
        raise _malformed(f"{where}.dtype", error.message) from None


def _malformed(where: str, what: str) -> LayoutFormError:
    return LayoutFormError(f"{where}: {what}", place=where)


def _get(item: object, key: str, where: str) -> Any:
    mapping = _mapping(item, where)
    if key not in mapping:
        raise _malformed(where, f"{key!r} is missing")
    return mapping[key]


def _text(item: Json, key: str, where: str) -> str:
    return _name(_get(item, key, where), f"{where}.{key}")


def _name(data: object, where: str, least: int = 1) -> str:
    if not isinstance(data, str) or len(data) < least:
        raise _malformed(where, f"{_short(data)} is not a name")
    return data


def _texts(data: object, where: str) -> tuple[str, ...]:
    return tuple(_name(text, place) for place, text in _items(data, where))


def _mapping(data: object, where: str) -> Json:
    if not isinstance(data, Mapping):
        raise _malformed(where, f"expected an object, got {type(data).__name__}")
    return data


def _items(data: object, where: str) -> list[tuple[str, Any]]:
    """The items of a list, each with its place."""
    if not isinstance(data, Sequence) or isinstance(data, str | bytes):
        raise _malformed(where, f"expected a list, got {type(data).__name__}")
    return [(f"{where}[{index}]", item) for index, item in enumerate(data)]


def _int(data: object, where: str) -> int:
    if not isinstance(data, int) or isinstance(data, bool):
        raise _malformed(where, f"{_short(data)} is not an integer")
    return data


def _ints(data: object, where: str) -> tuple[int, ...]:
    return tuple(_int(value, place) for place, value in _items(data, where))


def _short(data: object) -> str:
    """A value as it goes into a message, however long it is."""
    text = repr(data)
    return text if len(text) <= 60 else f"{text[:57]}..."
