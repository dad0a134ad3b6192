"""Translate layouts, block lists and model identities to and from messages; check hash forms."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from restow.broker.block_ids import MAX_BLOCKS, is_whole, packed, unpacked
from restow.broker.errors import ChainInvalidError, LayoutFormError, PagesError, RequestError
from restow.broker.layout import Box, DType, Kind, Layout, Span
from restow.broker.layout.check_whole import check_counts
from restow.broker.layout.rows import Int64s
from restow.broker.layout.schema import MODEL, NEEDED, RANK, Record, Sort
from restow.broker.layout.values import MAX_AXES, MAX_WORD_LENGTH, ModelIdentity
from restow.broker.text_bytes import text_bytes
from restow.v1 import broker_pb2, layout_pb2

MAX_ALGORITHM_LENGTH = 64
MAX_QUANTUM_TOKENS = 16_384
MAX_HASH_BYTES = 64
MAX_SALT_LENGTH = 256
MAX_BATCH_HASHES = 4096
"""Hashes in a batch of holdings, over all of its runs."""
WORD_BYTES = 8
_HALF = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair, which no message can contain."""


def check_form(algorithm: str, quantum_tokens: int, hash_bytes: int) -> None:
    """Raise `ChainInvalidError` for an invalid hash form."""
    if not 0 < len(algorithm) <= MAX_ALGORITHM_LENGTH or not algorithm.isprintable():
        raise ChainInvalidError(
            f"algorithm must have 1 to {MAX_ALGORITHM_LENGTH} printable characters",
            field="algorithm",
        )
    if hash_bytes % WORD_BYTES or not WORD_BYTES <= hash_bytes <= MAX_HASH_BYTES:
        raise ChainInvalidError(
            f"hash_bytes is {hash_bytes}; it must be a multiple of {WORD_BYTES}, at most "
            f"{MAX_HASH_BYTES}",
            field="hash_bytes",
        )
    if not is_whole(quantum_tokens, MAX_QUANTUM_TOKENS + 1) or not quantum_tokens:
        raise ChainInvalidError(
            f"quantum_tokens is {quantum_tokens!r}; it must be 1 to {MAX_QUANTUM_TOKENS}",
            field="quantum_tokens",
        )


def check_salt(salt: str) -> None:
    """Raise `ChainInvalidError` for a salt that is too long or cannot be encoded."""
    if len(salt) > MAX_SALT_LENGTH:
        raise ChainInvalidError(
            f"a salt has {len(salt)} characters; the limit is {MAX_SALT_LENGTH}", field="salt"
        )
    if _HALF.search(salt):
        raise ChainInvalidError("a salt contains a lone surrogate, which is no text", field="salt")


def check_revision(revision: str) -> None:
    """Raise `RequestError` for an invalid revision; an empty text is invalid too."""
    if not 0 < len(revision) <= MAX_WORD_LENGTH or not revision.isprintable():
        raise RequestError(
            f"a revision must have 1 to {MAX_WORD_LENGTH} printable characters", field="revision"
        )


VALUE_BYTES = 128
"""Overhead of a compound value: the object, and its place in a list."""
NUMBER_BYTES = 40
SPAN_BYTES = 128


def bytes_as_values(message: layout_pb2.Layout) -> int:
    """Return roughly how many bytes a layout takes as values.

    Raises `LayoutFormError` if it has more parts than can be checked individually.
    """
    check_counts(message)
    ranks_bytes = sum(_size_of(rank, RANK) for rank in message.ranks)
    return message.ByteSize() + _size_of(message.model, MODEL) + ranks_bytes


def _size_of(message: Any, record: Record) -> int:
    size_bytes = VALUE_BYTES
    for attribute in record.attributes:
        size_bytes += _SIZES[attribute.sort](getattr(message, attribute.name))
    for part in record.nested:
        for inner in getattr(message, part.name):
            size_bytes += _size_of(inner, part.record)
    return size_bytes


_SIZES: dict[Sort, Callable[[Any], int]] = {
    Sort.NAME: text_bytes,
    Sort.TEXT: text_bytes,
    Sort.NUMBER: lambda _: NUMBER_BYTES,
    Sort.FLAG: lambda _: 0,
    Sort.NUMBERS: lambda numbers: VALUE_BYTES + NUMBER_BYTES * len(numbers),
    Sort.NAMES: lambda names: VALUE_BYTES + sum(map(text_bytes, names)),
    Sort.BOX: lambda spans: VALUE_BYTES + SPAN_BYTES * len(spans),
    Sort.DTYPE: lambda _: 0,
    Sort.KIND: lambda _: 0,
}


_KINDS = {
    layout_pb2.FIELD_KIND_PER_TOKEN: Kind.PER_TOKEN,
    layout_pb2.FIELD_KIND_SNAPSHOT: Kind.SNAPSHOT,
}
_KIND_NUMBERS = {kind: number for number, kind in _KINDS.items()}
_DTYPES = {dtype.value: dtype for dtype in DType}


def layout_to_proto(layout: Layout) -> layout_pb2.Layout:
    """Return the layout as a message."""
    parts: dict[str, Any] = {
        "model": _message_fields(layout.model, MODEL),
        "ranks": [_message_fields(rank, RANK) for rank in layout.ranks],
    }
    return layout_pb2.Layout(**parts)


def identity_of(model: broker_pb2.ModelName | layout_pb2.Model) -> ModelIdentity:
    """Return the model that a message names."""
    return ModelIdentity(model.name, model.revision, model.adapter, model.quantisation)


def _message_fields(value: object, record: Record) -> dict[str, Any]:
    """Return the fields of a value's message."""
    written: dict[str, Any] = {}
    for attribute in record.attributes:
        held, write = getattr(value, attribute.name), _WRITE.get(attribute.sort)
        if attribute.later and held == attribute.default:
            continue
        written[attribute.name] = write(held) if write else held
    for part in record.nested:
        written[part.name] = [
            _message_fields(inner, part.record) for inner in getattr(value, part.name)
        ]
    return written


_WRITE: dict[Sort, Callable[[Any], object]] = {
    Sort.BOX: lambda box: [{"start": span.start, "stop": span.stop} for span in box],
    Sort.KIND: _KIND_NUMBERS.__getitem__,
}


def layout_from_proto(message: layout_pb2.Layout) -> Layout:
    """Return the layout of a message. Raises `LayoutFormError`; `check_layout` checks the rest.

    A message with fields that this release does not know is refused: an unknown field might
    distinguish pages with other tokens or other values.
    """
    # Empty parts take two bytes in a message and much more as values, so count them first.
    check_counts(message)
    said_bytes = message.ByteSize()
    message.DiscardUnknownFields()
    if message.ByteSize() != said_bytes:
        raise LayoutFormError(
            "the layout has fields that this release does not know, so the engine's release is "
            "newer: upgrade the broker first"
        )
    for field in (*message.model.fields, *message.model.inputs):
        if field.kind not in _KINDS or not field.name:
            raise LayoutFormError(
                f"field {field.name!r}: name and kind are required", field=field.name
            )
    model = _value(message.model, MODEL, 0)
    return Layout(model, tuple(_value(rank, RANK, rank.rank) for rank in message.ranks))


def _value(message: Any, record: Record, rank: int) -> Any:
    """Return the value of a message that belongs to ``rank``."""
    values: dict[str, Any] = {}
    for attribute in record.attributes:
        given = getattr(message, attribute.name)
        if read := _READ.get(attribute.sort):
            values[attribute.name] = read(given)
            if values[attribute.name] is None:
                raise _unknown(message, record, rank, f"{attribute.name} {given}")
        elif (
            given
            or attribute.default is NEEDED
            or (attribute.zero and message.HasField(attribute.name))
        ):
            values[attribute.name] = given
        else:
            values[attribute.name] = attribute.default
    for part in record.nested:
        values[part.name] = tuple(
            _value(inner, part.record, rank) for inner in getattr(message, part.name)
        )
    return record.of(**values)


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
"""A reader returns None for an unknown number."""


def block_list(
    group: str, ids: Iterable[int] | Int64s, first_block: int = 0
) -> broker_pb2.BlockList:
    """Return block ids as a message. Raises `PagesError` for ids that are not int32."""
    array = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), np.int64)
    if array.ndim != 1 or (array.size and not 0 <= array.min() <= array.max() < 2**31):
        raise PagesError(f"group {group}: block ids must be a list of int32", group=group)
    if array.size > MAX_BLOCKS:
        raise PagesError(
            f"group {group}: {array.size} block ids, but a message has at most {MAX_BLOCKS}",
            group=group,
        )
    return broker_pb2.BlockList(group=group, first_block=first_block, block_ids=packed(array))


def block_lists(blocks: Mapping[str, Iterable[int] | Int64s]) -> list[broker_pb2.BlockList]:
    """Return all lists of a side as messages."""
    return [block_list(group, ids) for group, ids in blocks.items()]


def blocks_from_proto(messages: Iterable[broker_pb2.BlockList]) -> dict[str, Int64s]:
    """Return block ids by group as int64. Raises `PagesError` for bytes that are not int32."""
    return {message.group: unpacked(message.group, message.block_ids) for message in messages}
