"""How many bytes a layout takes as values and message, told before any of them is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from restow.broker.layout.check import check_counts
from restow.broker.layout.schema import MODEL, RANK, Record, Sort
from restow.broker.text_bytes import text_bytes
from restow.v1 import layout_pb2

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
