"""Odd values of every kind of field: the ends of ranges, and what lies one beside them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from hypothesis import strategies as st

Strategy = st.SearchStrategy[Any]

INT32S = (0, 1, -1, 2, 15, 16, 17, 255, 65_536, 2**31 - 1, -(2**31))
INT64S = (*INT32S, 2**31, 2**32 - 1, 2**36, 2**36 + 1, 2**53 + 1, 2**62, 2**63 - 1, -(2**63))
FLOATS = (
    0.0,
    -0.0,
    1.0,
    -1.0,
    1e-6,
    1e9,
    5e-324,
    1.7e308,
    float("inf"),
    float("-inf"),
    float("nan"),
)
LONG_STRING = "x" * 20_000
STRINGS = (
    "",
    "x",
    " ",
    "a\0b",
    "\n",
    "é",
    "\u202e\U0001f600",
    "\U0001f600" * 256,
    "x" * 256,
    "x" * 257,
    "%s{}%41",
    "Ä" * 5000,
    LONG_STRING,
)
UNKNOWN_NUMBERS = (-1, 99, 2**31 - 1, -(2**31))

_POWERS = st.builds(lambda power, more: 2**power + more, st.integers(1, 62), st.integers(-1, 1))
_SIGNED = {
    FieldDescriptor.CPPTYPE_INT32: st.one_of(
        st.sampled_from(INT32S), st.integers(-(2**31), 2**31 - 1)
    ),
    FieldDescriptor.CPPTYPE_INT64: st.one_of(
        st.sampled_from(INT64S), _POWERS, st.integers(-(2**63), 2**63 - 1)
    ),
    FieldDescriptor.CPPTYPE_UINT32: st.sampled_from([one % 2**32 for one in INT64S]),
    FieldDescriptor.CPPTYPE_UINT64: st.sampled_from([one % 2**64 for one in INT64S]),
    FieldDescriptor.CPPTYPE_DOUBLE: st.one_of(st.sampled_from(FLOATS), st.floats()),
    FieldDescriptor.CPPTYPE_FLOAT: st.one_of(st.sampled_from(FLOATS[:-5]), st.floats(width=32)),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
}
_TEXT = st.one_of(st.sampled_from(STRINGS), st.text(st.characters(codec="utf-8"), max_size=8))


def packed(numbers: Sequence[int], form: str = "i") -> bytes:
    """Return little-endian numbers, one after the other, as block ids and tables travel."""
    return struct.pack(f"<{len(numbers)}{form}", *numbers)


_BYTES = st.one_of(
    st.sampled_from([b"", b"\0", b"\0\0\0", b"\xff" * 5, b"\0" * 4096, b"\x80" * 4097]),
    st.lists(st.sampled_from(INT32S), max_size=6).map(packed),
    st.lists(st.sampled_from(INT64S), min_size=13, max_size=26).map(lambda ids: packed(ids, "q")),
    st.sampled_from([packed([0] * 1000), packed(range(-3, 70)), packed([7, 7, 7])]),
    st.binary(max_size=16),
)
_ENUMS: dict[str, Strategy] = {}


def odd_value(field: FieldDescriptor) -> Strategy:
    """Return a strategy for a field that is no message: valid values and others."""
    kind = field.enum_type
    if kind is not None:
        if kind.full_name not in _ENUMS:
            numbers = [value.number for value in kind.values]
            _ENUMS[kind.full_name] = st.sampled_from([*numbers, *UNKNOWN_NUMBERS])
        return _ENUMS[kind.full_name]
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return _BYTES if field.type == FieldDescriptor.TYPE_BYTES else _TEXT
    return _SIGNED[field.cpp_type]


def near(value: Any) -> Any:
    """Return a strategy for values close to a valid one."""
    if isinstance(value, bool) or not isinstance(value, int):
        return st.just(value)
    return st.sampled_from([value - 1, value + 1, 2 * value, -value, value // 2])
