"""Layouts as JSON: the format of layout files and of `restow layout`.

The format is stable (docs/layouts.md, "Layout files"), because users' scripts read it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from restow.broker.errors import LayoutFormError
from restow.broker.layout import json_values as read
from restow.broker.layout.schema import MODEL, NEEDED, RANK, REGION, SHARD, Attribute, Record, Sort
from restow.broker.layout.span import Box, Span
from restow.broker.layout.values import DType, Field, Kind, Layout, RankLayout, Shard


def layout_to_json(layout: Layout) -> dict[str, Any]:
    """Return the layout as plain dicts and lists."""
    fields = {field.name: field for field in (*layout.model.fields, *layout.model.inputs)}
    return {
        "model": _to_json(layout.model, MODEL, fields),
        "ranks": [_to_json(rank, RANK, fields) for rank in layout.ranks],
    }


def _to_json(value: Any, record: Record, fields: Mapping[str, Field]) -> dict[str, Any]:
    written: dict[str, Any] = {}
    for attribute in record.attributes:
        held, write = getattr(value, attribute.name), _WRITE.get(attribute.sort)
        if not attribute.sparse or held != attribute.default:
            written[attribute.key or attribute.name] = write(held) if write else held
    for part in record.nested:
        written[part.name] = [
            _to_json(inner, part.record, fields) for inner in getattr(value, part.name)
        ]
    if record is SHARD:  # a shard repeats the form of its field
        field = fields[value.field]
        form = {"field": field.name, "kind": field.kind.value, "axes": list(field.axes)}
        return {**form, **written}
    return written


def box_to_json(box: Box) -> list[list[int]]:
    """Return a box as ``[[start, stop], ...]``."""
    return [[span.start, span.stop] for span in box]


_WRITE: dict[Sort, Callable[[Any], object]] = {
    Sort.NAMES: list,
    Sort.NUMBERS: list,
    Sort.BOX: box_to_json,
    Sort.DTYPE: lambda dtype: dtype.label,
    Sort.KIND: lambda kind: kind.value,
}


def layout_from_json(data: object) -> Layout:
    """Read a layout. Raises `LayoutFormError` that names the place of a fault.

    Only the format is checked here; `check_layout` proves that the parts fit. A model without a
    list of fields gets the fields of its shards, each as large as its shards reach.
    """
    top = read.mapping(data, "layout")
    model_data = read.mapping(read.get(top, "model", "layout"), "model")
    listed = read.items(read.get(top, "ranks", "layout"), "ranks")
    ranks = [(where, rank, _value(rank, RANK, where)) for where, rank in listed]
    of_shards = {"fields": _reached(ranks, "shards"), "inputs": _reached(ranks, "inputs")}
    model = _value(model_data, MODEL, "model")
    for name, reached in of_shards.items():
        if name in model_data:
            _check_same_fields(getattr(model, name), reached)
        else:
            model = replace(model, **{name: tuple(reached.values())})
    return Layout(model, tuple(rank for _, _, rank in ranks))


def _value(data: object, record: Record, where: str) -> Any:
    item = read.mapping(data, where)
    if record is REGION and "group" not in item:
        item = {**item, "group": "state" if item.get("page_tokens") is None else "attention"}
    values = {attribute.name: _attribute(item, attribute, where) for attribute in record.attributes}
    for part in record.nested:
        listed = read.get(item, part.name, where) if part.needed else item.get(part.name, ())
        values[part.name] = tuple(
            _value(inner, part.record, place)
            for place, inner in read.items(listed, f"{where}.{part.name}")
        )
    return record.of(**values)


def _attribute(item: read.Json, attribute: Attribute, where: str) -> Any:
    key = attribute.key or attribute.name
    data = (
        read.get(item, key, where)
        if attribute.default is NEEDED
        else item.get(key, attribute.default)
    )
    if data is None and attribute.default is None:
        return None
    return _READ[attribute.sort](data, f"{where}.{key}")


def _reached(ranks: list[tuple[str, Any, RankLayout]], part: str) -> dict[str, Field]:
    """Return the fields of shards, each as large as its shards reach."""
    fields: dict[str, Field] = {}
    for where, rank_data, rank in ranks:
        shards: tuple[Shard, ...] = getattr(rank, part)
        for (place, item), shard in zip(
            read.items(rank_data.get(part, ()), f"{where}.{part}"), shards, strict=True
        ):
            name, reach = shard.field, tuple(span.stop for span in shard.box)
            axes = read.texts(read.get(item, "axes", place), f"{place}.axes")
            kind = _kind(read.get(item, "kind", place), f"{place}.kind")
            old = fields.get(name, Field(name, kind, axes, reach))
            if (old.axes, old.kind, len(old.shape)) != (axes, kind, len(reach)):
                raise LayoutFormError(
                    f"{place}: field {name} has other axes or another kind than before",
                    place=place,
                    field=name,
                )
            fields[name] = Field(name, kind, axes, tuple(map(max, old.shape, reach)))
    return fields


def _check_same_fields(listed: tuple[Field, ...], reached: Mapping[str, Field]) -> None:
    """Check that the shards have the kinds and axes of the model's fields."""
    for field in listed:
        shards = reached.get(field.name)
        if shards is not None and (shards.kind, shards.axes) != (field.kind, field.axes):
            raise LayoutFormError(
                f"field {field.name}: the model has {field.kind} {list(field.axes)}, its shards "
                f"{shards.kind} {list(shards.axes)}",
                place="model.fields",
                field=field.name,
            )


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


def _kind(data: object, where: str) -> Kind:
    text = read.name(data, where)
    try:
        return Kind(text)
    except ValueError:
        raise read.malformed(where, f"{text!r} is neither per_token nor snapshot") from None


def _dtype(data: object, where: str) -> DType:
    text = read.name(data, where)
    try:
        return DType.parse(text)
    except LayoutFormError as error:
        raise read.malformed(where, error.message) from None


_READ: dict[Sort, Callable[[object, str], object]] = {
    Sort.NAME: read.name,
    Sort.TEXT: read.text,
    Sort.NUMBER: read.integer,
    Sort.FLAG: read.flag,
    Sort.NAMES: read.texts,
    Sort.NUMBERS: read.integers,
    Sort.BOX: _box,
    Sort.DTYPE: _dtype,
    Sort.KIND: _kind,
}
