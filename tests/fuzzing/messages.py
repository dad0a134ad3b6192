"""Messages of any type, and valid ones with a few things changed.

Random messages die at the first check. So most fields get a value that is known to be good at that
place, and as many as are wished an odd one: the ends of ranges, and what lies one beside them.
"""

from __future__ import annotations

import copy
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
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


MANY = 40
MAX_DEPTH = 6
EIGHTS = st.integers(0, 7)
ODDNESS = st.sampled_from([0, 0, 0, 1, 1, 2, 5])
"""Of eight fields, how many get an odd value."""
_FEW = st.integers(0, 2)
_ODD_COUNTS = st.sampled_from([0, 1, 2, 3, MANY])


T = TypeVar("T")


class Draw(Protocol):
    """What draws from strategies: of a composite one, or in the midst of a test."""

    def __call__(self, strategy: st.SearchStrategy[T], /) -> T:
        """Draw one value."""


@dataclass(frozen=True, slots=True)
class Known:
    """Values that are good at their place.

    ``values`` has those of fields, by full name (``restow.v1.Demand.blocks``: whole lists) or else
    by short name (``handoff_id``); ``messages`` those of messages, by their full names. Members of
    oneofs that are ``seldom`` right are so only where much is odd; fields ``at_times`` are left out
    as often as not.
    """

    values: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    messages: Mapping[str, Sequence[Message]] = field(default_factory=dict)
    seldom: frozenset[str] = frozenset()
    at_times: frozenset[str] = frozenset()

    def of_field(self, one: FieldDescriptor) -> Sequence[Any] | None:
        """Return the values that may stand in a field; None: no value is known."""
        found = self.values.get(one.full_name)
        return self.values.get(one.name) if found is None else found


NOTHING = Known()


def message_type(descriptor: Descriptor) -> type[Message]:
    """Return the Python class of a message type."""
    return GetMessageClass(descriptor)


@st.composite
def messages(
    draw: st.DrawFn, descriptor: Descriptor, known: Known = NOTHING, odd: int | None = None
) -> Message:
    """Draw any message of a type; ``odd`` of eight fields are odd, None: a drawn number."""
    return draw_message(draw, descriptor, known, draw(ODDNESS) if odd is None else odd)


def draw_message(
    draw: Draw, descriptor: Descriptor, known: Known, odd: int, depth: int = 0
) -> Message:
    """Draw a message, field by field."""
    whole = known.messages.get(descriptor.full_name)
    if whole and draw(EIGHTS) >= odd:
        return draw(st.sampled_from(whole))
    made = message_type(descriptor)()
    if depth >= MAX_DEPTH:
        return made
    chosen = {one.name: _member(draw, one.fields, known, odd) for one in descriptor.oneofs}
    for one in descriptor.fields:
        oneof = one.containing_oneof
        if oneof is None or chosen[oneof.name] is one:
            _fill(draw, made, one, known, odd, depth)
    return made


def _member(
    draw: Draw, members: Sequence[FieldDescriptor], known: Known, odd: int
) -> FieldDescriptor | None:
    """Draw which member of a oneof is set; perhaps none."""
    if odd and draw(EIGHTS) == 0:
        return None
    usual = [one for one in members if one.full_name not in known.seldom]
    return draw(st.sampled_from(list(members) if odd > 2 or not usual else usual))


def _fill(
    draw: Draw, made: Message, one: FieldDescriptor, known: Known, odd: int, depth: int
) -> None:
    if one.full_name in known.at_times and draw(st.booleans()):
        return
    is_odd = draw(EIGHTS) < odd
    good = known.of_field(one)
    if one.is_repeated:
        _fill_list(draw, made, one, known, odd, depth, is_odd)
    elif one.message_type is not None:
        if not (is_odd and draw(st.booleans())):
            part = draw_message(draw, one.message_type, known, odd, depth + 1)
            getattr(made, one.name).CopyFrom(part)
    elif good and not is_odd:
        setattr(made, one.name, draw(st.sampled_from(good)))
    else:
        setattr(made, one.name, draw(odd_value(one)))


def _fill_list(
    draw: Draw,
    made: Message,
    one: FieldDescriptor,
    known: Known,
    odd: int,
    depth: int,
    is_odd: bool,
) -> None:
    good = known.of_field(one)
    target = getattr(made, one.name)
    if good and not is_odd:
        target.extend(draw(st.sampled_from(good)))
        return
    count = draw(_ODD_COUNTS if is_odd else _FEW)
    for index in range(count):
        if index > 2:  # many are alike: what counts is that they are many
            target.append(target[index % 3])
        elif one.message_type is not None:
            target.append(draw_message(draw, one.message_type, known, odd, depth + 1))
        else:
            target.append(draw(odd_value(one)))


M = TypeVar("M", bound=Message)

_CHANGES = st.sampled_from(["odd", "odd", "near", "near", "clear", "double", "delete", "swap"])
_COUNTS = st.sampled_from([1, 1, 1, 2, 4])


@dataclass(frozen=True, slots=True)
class Spot:
    """A field of a message inside of another; ``index`` counts in a repeated one, -1: none."""

    owner: Message
    field: Any
    index: int = -1

    @property
    def value(self) -> Any:
        """Return the value at this spot."""
        found = getattr(self.owner, self.field.name)
        return found if self.index < 0 else found[self.index]


def spots(message: Message) -> Iterator[Spot]:
    """Yield every field and every element of a message, from outer to inner."""
    for one in message.DESCRIPTOR.fields:
        if one.containing_oneof is not None and not message.HasField(one.name):
            continue
        if one.is_repeated:
            for index, item in enumerate(getattr(message, one.name)):
                yield Spot(message, one, index)
                if one.message_type is not None:
                    yield from spots(item)
            continue
        yield Spot(message, one)
        if one.message_type is not None and message.HasField(one.name):
            yield from spots(getattr(message, one.name))


@st.composite
def mutated(draw: st.DrawFn, message: M, known: Known = NOTHING) -> M:
    """Draw a copy of a message with a few changes."""
    changed = type(message)()
    changed.CopyFrom(message)
    for _ in range(draw(_COUNTS)):
        found = list(spots(changed))
        if found:
            _change(draw, draw(st.sampled_from(found)), known)
    return changed


def _change(draw: Draw, spot: Spot, known: Known) -> None:
    how, one = draw(_CHANGES), spot.field
    if how == "clear":
        spot.owner.ClearField(one.name)
    elif spot.index >= 0 and how in ("double", "delete", "swap"):
        items = getattr(spot.owner, one.name)
        if how == "double":
            items.append(items[spot.index])
        elif how == "delete":
            del items[spot.index]
        else:
            kept = [*items]
            kept[0], kept[spot.index] = copy.copy(kept[spot.index]), copy.copy(kept[0])
            spot.owner.ClearField(one.name)
            getattr(spot.owner, one.name).extend(kept)
    elif one.message_type is not None:
        spot.value.CopyFrom(draw_message(draw, one.message_type, known, 4))
    else:
        value = draw(near(spot.value) if how == "near" else odd_value(one))
        _put(spot, value)


def _put(spot: Spot, value: Any) -> None:
    try:
        if spot.index >= 0:
            getattr(spot.owner, spot.field.name)[spot.index] = value
        else:
            setattr(spot.owner, spot.field.name, value)
    except ValueError:
        return  # one beyond the last number that the field holds: no such message exists


@st.composite
def spoiled(draw: st.DrawFn, data: bytes) -> bytes:
    """Draw a message's bytes cut short, with flipped bits, or with other bytes in between."""
    spoilt = bytearray(data)
    for _ in range(draw(_COUNTS)):
        at = draw(st.integers(0, max(0, len(spoilt) - 1)))
        how = draw(st.sampled_from(["cut", "flip", "flip", "put", "double"]))
        if how == "cut":
            del spoilt[at:]
        elif how == "flip" and spoilt:
            spoilt[at] ^= 1 << draw(st.integers(0, 7))
        elif how == "put":
            spoilt[at:at] = draw(st.binary(min_size=1, max_size=8))
        else:
            spoilt += spoilt[at : at + 64]
    return bytes(spoilt)


_ODD_JSON = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([*INT64S, 10**30, -(10**30)]),
    st.sampled_from([*FLOATS, 1.5]),
    st.sampled_from([*STRINGS, "\ud800", "per_token", "bfloat16"]),
    st.sampled_from([[], {}, [[]], [[0, 1]], [0, 1], {"": None}]),
)


@st.composite
def mutated_json(draw: st.DrawFn, data: Any) -> Any:
    """Draw a copy of a JSON value with a few changes."""
    changed = copy.deepcopy(data)
    for _ in range(draw(_COUNTS)):
        places = list(_places(changed))
        if places:
            owner, key = draw(st.sampled_from(places))
            how = draw(st.sampled_from(["odd", "near", "delete", "double"]))
            if how == "delete":
                del owner[key]
            elif how == "double" and isinstance(owner, list):
                owner.append(owner[key])
            elif how == "near":
                owner[key] = draw(near(owner[key]))
            else:
                owner[key] = copy.deepcopy(draw(_ODD_JSON))
    return changed


def _places(data: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every value in a JSON value, as its owner and its key."""
    items = data.items() if isinstance(data, dict) else enumerate(data)
    for key, value in items:
        yield data, key
        if isinstance(value, dict | list):
            yield from _places(value)
