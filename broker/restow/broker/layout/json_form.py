"""Layouts as JSON: the form of layout files and of `RegisterEngine`.

The shape is fixed (README, "Layout files"): people's scripts read it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from restow.broker.errors import LayoutFormError
from restow.broker.layout.dtype import DType
from restow.broker.layout.span import Box, Span
from restow.broker.layout.values import Field, Kind, Layout, Model, RankLayout, Region, Shard

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
                }
                for f in layout.model.fields
            ],
        },
        "ranks": [
            {
                "rank": rank.rank,
                "regions": [_region_to_json(region) for region in rank.regions],
                "shards": [_shard_to_json(shard, fields[shard.field]) for shard in rank.shards],
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


def layout_from_json(data: object) -> Layout:
    """Read a layout. Raises `LayoutFormError` that names the place of what is wrong.

    Only the form is checked here; `check_layout` proves that the parts fit.
    """
    top = _mapping(data, "layout")
    model_json = _mapping(_get(top, "model", "layout"), "model")
    ranks_json = _list(_get(top, "ranks", "layout"), "ranks")
    ranks = tuple(_rank(rank, f"ranks[{i}]") for i, rank in enumerate(ranks_json))
    if "fields" in model_json:
        fields_json = _list(model_json["fields"], "model.fields")
        fields = tuple(_field(f, f"model.fields[{i}]") for i, f in enumerate(fields_json))
    else:
        fields = _fields_of_shards(ranks_json)
    return Layout(Model(str(model_json.get("name", "")), fields), ranks)


def _fields_of_shards(ranks_json: Sequence[Any]) -> tuple[Field, ...]:
    """Fields of a model that lists none: each as large as its shards reach."""
    found: dict[str, Field] = {}
    for i, rank in enumerate(ranks_json):
        for j, item in enumerate(_list(_get(rank, "shards", f"ranks[{i}]"), "shards")):
            where = f"ranks[{i}].shards[{j}]"
            name = _text(item, "field", where)
            box = _box(_get(item, "box", where), where)
            axes = tuple(str(axis) for axis in _list(_get(item, "axes", where), where))
            kind = _kind(item, where)
            old = found.get(name)
            if old is not None and (old.axes != axes or old.kind != kind):
                raise LayoutFormError(
                    f"{where}: field {name} has other axes or another kind than before", field=name
                )
            reach = tuple(span.stop for span in box)
            shape = reach if old is None else tuple(map(max, old.shape, reach))
            found[name] = Field(name, kind, axes, shape)
    return tuple(found.values())


def _field(data: object, where: str) -> Field:
    item = _mapping(data, where)
    return Field(
        name=_text(item, "field", where),
        kind=_kind(item, where),
        axes=tuple(str(axis) for axis in _list(_get(item, "axes", where), where)),
        shape=_ints(_get(item, "shape", where), f"{where}.shape"),
    )


def _rank(data: object, where: str) -> RankLayout:
    item = _mapping(data, where)
    return RankLayout(
        rank=_int(_get(item, "rank", where), f"{where}.rank"),
        regions=tuple(
            _region(region, f"{where}.regions[{i}]")
            for i, region in enumerate(_list(_get(item, "regions", where), f"{where}.regions"))
        ),
        shards=tuple(
            _shard(shard, f"{where}.shards[{i}]")
            for i, shard in enumerate(_list(_get(item, "shards", where), f"{where}.shards"))
        ),
    )


def _region(data: object, where: str) -> Region:
    item = _mapping(data, where)
    tokens = item.get("page_tokens")
    default_group = "state" if tokens is None else "attention"
    return Region(
        name=_text(item, "name", where),
        group=str(item.get("group", default_group)),
        page_stride_bytes=_int(_get(item, "page_stride_bytes", where), where),
        page_tokens=None if tokens is None else _int(tokens, f"{where}.page_tokens"),
        pages_per_block=_int(item.get("pages_per_block", 1), f"{where}.pages_per_block"),
    )


def _shard(data: object, where: str) -> Shard:
    item = _mapping(data, where)
    token_stride = item.get("token_stride_bytes")
    return Shard(
        field=_text(item, "field", where),
        box=_box(_get(item, "box", where), where),
        dtype=DType.parse(_text(item, "dtype", where)),
        region=_text(item, "region", where),
        offset_bytes=_int(_get(item, "offset_bytes", where), f"{where}.offset_bytes"),
        strides_bytes=_ints(_get(item, "strides_bytes", where), f"{where}.strides_bytes"),
        token_stride_bytes=(
            None if token_stride is None else _int(token_stride, f"{where}.token_stride_bytes")
        ),
    )


def _box(data: object, where: str) -> Box:
    spans = []
    for pair in _list(data, f"{where}.box"):
        numbers = _ints(pair, f"{where}.box")
        if len(numbers) != 2:
            raise LayoutFormError(f"{where}.box: {pair!r} is not [start, stop]")
        spans.append(Span(*numbers))
    return tuple(spans)


def _kind(item: Json, where: str) -> Kind:
    text = _text(item, "kind", where)
    try:
        return Kind(text)
    except ValueError:
        raise LayoutFormError(f"{where}.kind: {text!r} is neither per_token nor snapshot") from None


def _get(item: object, key: str, where: str) -> Any:
    mapping = _mapping(item, where)
    if key not in mapping:
        raise LayoutFormError(f"{where}: {key!r} is missing")
    return mapping[key]


def _text(item: Json, key: str, where: str) -> str:
    value = _get(item, key, where)
    if not isinstance(value, str) or not value:
        raise LayoutFormError(f"{where}.{key}: {value!r} is not a name")
    return value


def _mapping(data: object, where: str) -> Json:
    if not isinstance(data, Mapping):
        raise LayoutFormError(f"{where}: expected an object, got {type(data).__name__}")
    return data


def _list(data: object, where: str) -> Sequence[Any]:
    if not isinstance(data, Sequence) or isinstance(data, str | bytes):
        raise LayoutFormError(f"{where}: expected a list, got {type(data).__name__}")
    return data


def _int(data: object, where: str) -> int:
    if not isinstance(data, int) or isinstance(data, bool):
        raise LayoutFormError(f"{where}: {data!r} is not an integer")
    return data


def _ints(data: object, where: str) -> tuple[int, ...]:
    return tuple(_int(value, where) for value in _list(data, where))
