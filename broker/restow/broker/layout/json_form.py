"""Layouts as JSON: the format of layout files and of `restow layout`.

The format is stable (docs/layouts.md, "Layout files"), because users' scripts read it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from restow.broker.errors import LayoutFormError
from restow.broker.layout.schema import MODEL, NEEDED, RANK, REGION, SHARD, Attribute, Record, Sort
from restow.broker.layout.span import Box, Span
from restow.broker.layout.values import DType, Field, Kind, Layout, RankLayout, Shard

Json = Mapping[str, Any]


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
    top = _mapping(data, "layout")
    model_data = _mapping(_get(top, "model", "layout"), "model")
    listed = _items(_get(top, "ranks", "layout"), "ranks")
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
    item = _mapping(data, where)
    if record is REGION and "group" not in item:
        item = {**item, "group": "state" if item.get("page_tokens") is None else "attention"}
    values = {attribute.name: _attribute(item, attribute, where) for attribute in record.attributes}
    for part in record.nested:
        listed = _get(item, part.name, where) if part.needed else item.get(part.name, ())
        values[part.name] = tuple(
            _value(inner, part.record, place)
            for place, inner in _items(listed, f"{where}.{part.name}")
        )
    return record.of(**values)


def _attribute(item: Json, attribute: Attribute, where: str) -> Any:
    key = attribute.key or attribute.name
    data = (
        _get(item, key, where) if attribute.default is NEEDED else item.get(key, attribute.default)
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
            _items(rank_data.get(part, ()), f"{where}.{part}"), shards, strict=True
        ):
            name, reach = shard.field, tuple(span.stop for span in shard.box)
            axes = _texts(_get(item, "axes", place), f"{place}.axes")
            kind = _kind(_get(item, "kind", place), f"{place}.kind")
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


def _malformed(where: str, fault: str) -> LayoutFormError:
    return LayoutFormError(f"{where}: {fault}", place=where)


def _get(item: object, key: str, where: str) -> Any:
    data = _mapping(item, where)
    if key not in data:
        raise _malformed(where, f"{key!r} is missing")
    return data[key]


def _name(data: object, where: str) -> str:
    """Return a non-empty text."""
    if not _text(data, where):
        raise _malformed(where, f"{data!r} is not a name")
    return str(data)


def _text(data: object, where: str) -> str:
    """Return a text; refuse lone surrogates, which JSON can express and UTF-8 cannot."""
    if not isinstance(data, str) or any("\ud800" <= letter <= "\udfff" for letter in data):
        raise _malformed(where, f"{_short(data)} is not a name")
    return data


def _texts(data: object, where: str) -> tuple[str, ...]:
    return tuple(_name(word, place) for place, word in _items(data, where))


def _mapping(data: object, where: str) -> Json:
    if not isinstance(data, Mapping):
        raise _malformed(where, f"expected an object, got {type(data).__name__}")
    return data


def _items(data: object, where: str) -> list[tuple[str, Any]]:
    """Return the items of a list, each with its place."""
    if not isinstance(data, Sequence) or isinstance(data, str | bytes):
        raise _malformed(where, f"expected a list, got {type(data).__name__}")
    return [(f"{where}[{index}]", item) for index, item in enumerate(data)]


def _integer(data: object, where: str) -> int:
    if not isinstance(data, int) or isinstance(data, bool):
        raise _malformed(where, f"{_short(data)} is not an integer")
    return data


def _flag(data: object, where: str) -> bool:
    if not isinstance(data, bool):
        raise _malformed(where, f"{_short(data)} is neither true nor false")
    return data


def _integers(data: object, where: str) -> tuple[int, ...]:
    return tuple(_integer(value, place) for place, value in _items(data, where))


def _short(data: object) -> str:
    shown = repr(data)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def _box(data: object, where: str) -> Box:
    spans = []
    for place, pair in _items(data, where):
        numbers = _integers(pair, place)
        if len(numbers) != 2 or not 0 <= numbers[0] < numbers[1]:
            raise _malformed(place, f"{list(numbers)} is not [start, stop] with 0 <= start < stop")
        spans.append(Span(*numbers))
    return tuple(spans)


def _kind(data: object, where: str) -> Kind:
    text = _name(data, where)
    try:
        return Kind(text)
    except ValueError:
        raise _malformed(where, f"{text!r} is neither per_token nor snapshot") from None


def _dtype(data: object, where: str) -> DType:
    text = _name(data, where)
    try:
        return DType.parse(text)
    except LayoutFormError as error:
        raise _malformed(where, error.message) from None


_READ: dict[Sort, Callable[[object, str], object]] = {
    Sort.NAME: _name,
    Sort.TEXT: _text,
    Sort.NUMBER: _integer,
    Sort.FLAG: _flag,
    Sort.NAMES: _texts,
    Sort.NUMBERS: _integers,
    Sort.BOX: _box,
    Sort.DTYPE: _dtype,
    Sort.KIND: _kind,
}
