"""Messages of any type, made from their descriptors.

Random messages die at the first check. So most fields get a value that is known to be good at that
place, and as many as are wished an odd one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

from fuzzing.scalars import odd_value

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
