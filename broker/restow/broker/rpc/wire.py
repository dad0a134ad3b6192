"""What a chain may be made by: bounds that both sides check before anything is sent or kept."""

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
"""Of one batch of holdings, in all of its runs."""
WORD_BYTES = 8
_HALF = re.compile("[\ud800-\udfff]")
"""Of a character that UTF-16 writes as two: no message can have it alone."""


def check_form(algorithm: str, quantum_tokens: int, hash_bytes: int) -> None:
    """Raise `ChainInvalidError` for what no chain can be made by."""
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
    """Raise `ChainInvalidError` for one that is too long, or no text that can be sent."""
    if len(salt) > MAX_SALT_LENGTH:
        raise ChainInvalidError(
            f"a salt has {len(salt)} characters; it may have {MAX_SALT_LENGTH}", field="salt"
        )
    if _HALF.search(salt):
        raise ChainInvalidError("a salt has half of a character", field="salt")


def check_revision(revision: str) -> None:
    """Raise `RequestError` for text that can be no revision; empty text is no revision, too."""
    if not 0 < len(revision) <= MAX_WORD_LENGTH or not revision.isprintable():
        raise RequestError(
            f"a revision must have 1 to {MAX_WORD_LENGTH} printable characters", field="revision"
        )


VALUE_BYTES = 128
"""Of a value that consists of others, beside these: itself, and its place in a list."""
NUMBER_BYTES = 40
SPAN_BYTES = 128


def bytes_as_values(message: layout_pb2.Layout) -> int:
    """About how many. Raises `LayoutFormError` for more parts than are looked at one by one."""
    check_counts(message)
    ranks_bytes = sum(_size_of(rank, RANK) for rank in message.ranks)
    return message.ByteSize() + _size_of(message.model, MODEL) + ranks_bytes


def _size_of(message: Any, record: Record) -> int:
    size_bytes = VALUE_BYTES
    for one in record.attributes:
        size_bytes += _SIZES[one.sort](getattr(message, one.name))
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
