"""Between the contract's messages and the broker's values. Nothing else is decided here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from restow.broker.block_ids import MAX_BLOCKS, packed, unpacked
from restow.broker.errors import LayoutFormError, PagesError
from restow.broker.layout import Box, DType, Kind, Layout, Span
from restow.broker.layout.check import check_counts
from restow.broker.layout.limits import MAX_AXES
from restow.broker.layout.rows import Int64s
from restow.broker.layout.schema import MODEL, NEEDED, RANK, Record, Sort
from restow.broker.layout.values import ModelIdentity
from restow.v1 import broker_pb2, layout_pb2

_KINDS = {
    layout_pb2.FIELD_KIND_PER_TOKEN: Kind.PER_TOKEN,
    layout_pb2.FIELD_KIND_SNAPSHOT: Kind.SNAPSHOT,
}
_KIND_NUMBERS = {kind: number for number, kind in _KINDS.items()}
_DTYPES = {dtype.value: dtype for dtype in DType}


def layout_to_proto(layout: Layout) -> layout_pb2.Layout:
    """The layout as a message."""
    parts: dict[str, Any] = {
        "model": _told(layout.model, MODEL),
        "ranks": [_told(rank, RANK) for rank in layout.ranks],
    }
    return layout_pb2.Layout(**parts)


def identity_of(model: broker_pb2.ModelName | layout_pb2.Model) -> ModelIdentity:
    """Which model a message names."""
    return ModelIdentity(model.name, model.revision, model.adapter, model.quantisation)


def _told(value: object, record: Record) -> dict[str, Any]:
    """What the message of a value is made of."""
    told: dict[str, Any] = {}
    for one in record.attributes:
        held, write = getattr(value, one.name), _WRITE.get(one.sort)
        if one.later and held == one.default:
            continue
        told[one.name] = write(held) if write else held
    for part in record.nested:
        told[part.name] = [_told(one, part.record) for one in getattr(value, part.name)]
    return told


_WRITE: dict[Sort, Callable[[Any], object]] = {
    Sort.BOX: lambda box: [{"start": span.start, "stop": span.stop} for span in box],
    Sort.KIND: _KIND_NUMBERS.__getitem__,
}


def layout_from_proto(message: layout_pb2.Layout) -> Layout:
    """The message as a layout. Raises `LayoutFormError`; `check_layout` does the rest.

    A message that says more than this release knows of is refused: what it leaves out might be what
    tells pages of other tokens or other values apart.
    """
    # Empty parts are two bytes in a message, and much more as values: so count them first.
    check_counts(message)
    said_bytes = message.ByteSize()
    message.DiscardUnknownFields()
    if message.ByteSize() != said_bytes:
        raise LayoutFormError(
            "the layout says what this release does not know of, so its engine is of a later one: "
            "upgrade the broker first"
        )
    for field in (*message.model.fields, *message.model.inputs):
        if field.kind not in _KINDS or not field.name:
            raise LayoutFormError(
                f"field {field.name!r}: name and kind are needed", field=field.name
            )
    model = _value(message.model, MODEL, 0)
    return Layout(model, tuple(_value(rank, RANK, rank.rank) for rank in message.ranks))


def _value(message: Any, record: Record, rank: int) -> Any:
    """The value of a message, which is one of ``rank``'s."""
    told: dict[str, Any] = {}
    for one in record.attributes:
        said = getattr(message, one.name)
        if read := _READ.get(one.sort):
            told[one.name] = read(said)
            if told[one.name] is None:
                raise _unknown(message, record, rank, f"{one.name} {said}")
        elif said or one.default is NEEDED or (one.zero and message.HasField(one.name)):
            told[one.name] = said
        else:
            told[one.name] = one.default
    for part in record.nested:
        told[part.name] = tuple(
            _value(one, part.record, rank) for one in getattr(message, part.name)
        )
    return record.of(**told)


def _unknown(message: Any, record: Record, rank: int, what: str) -> LayoutFormError:
    owner = record.attributes[0].name
    name = getattr(message, owner)
    return LayoutFormError(
        f"rank {rank}, {owner} {name}: {what} is unknown", ranks=rank, **{owner: name}
    )


def _box(spans: Sequence[layout_pb2.Span]) -> Box:
    if len(spans) > MAX_AXES:
        raise LayoutFormError(f"a box of {len(spans)} ranges; at most {MAX_AXES} are allowed")
    return tuple(Span(span.start, span.stop) for span in spans)


_READ: dict[Sort, Callable[[Any], object]] = {
    Sort.NAMES: tuple,
    Sort.NUMBERS: tuple,
    Sort.BOX: _box,
    Sort.DTYPE: _DTYPES.get,
    Sort.KIND: _KINDS.get,
}
"""None is what a number stands for that stands for nothing."""


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
    return broker_pb2.BlockList(group=group, first_block=first_block, block_ids=packed(array))


def block_lists(blocks: Mapping[str, Iterable[int] | Int64s]) -> list[broker_pb2.BlockList]:
    """All lists of one side."""
    return [block_list(group, ids) for group, ids in blocks.items()]


def blocks_from_proto(messages: Iterable[broker_pb2.BlockList]) -> dict[str, Int64s]:
    """Block ids by group, int64. Raises `PagesError` for bytes that are no int32."""
    return {message.group: unpacked(message.group, message.block_ids) for message in messages}
