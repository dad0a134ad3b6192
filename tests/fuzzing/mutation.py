"""Valid messages, bytes and JSON with a few things changed: they pass the first checks."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.message import Message
from hypothesis import strategies as st

from fuzzing.messages import NOTHING, Draw, Known, draw_message
from fuzzing.scalars import FLOATS, INT64S, STRINGS, near, odd_value

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
