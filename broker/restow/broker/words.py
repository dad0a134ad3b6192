"""Words of enums: where a value holds an enum's member, its word does too, and no other."""

from __future__ import annotations

from dataclasses import fields
from enum import Enum
from functools import cache
from types import UnionType
from typing import TypeVar, get_args, get_type_hints

from restow.broker.errors import WordUnknownError

E = TypeVar("E", bound=Enum)


def member(kind: type[E], value: object, where: str) -> E:
    """The member that ``value`` is or names. Raises `WordUnknownError` that lists the words."""
    if isinstance(value, kind):
        return value
    try:
        if isinstance(value, str):
            return kind(value)
    except ValueError:
        pass
    known = ", ".join(str(getattr(one, "label", one.value)) for one in kind)
    raise WordUnknownError(
        f"{where} is {value!r}; it must be one of {known} ({kind.__name__})", field=where
    )


class Worded:
    """A frozen dataclass that takes words for the members of its enums.

    Members are compared by identity: a word that stayed a string would be like none of them.
    Raises `WordUnknownError`. A class with a ``__post_init__`` of its own calls this one first.
    """

    __slots__ = ()

    def __post_init__(self) -> None:
        """Put members in place of words."""
        cls: type = type(self)
        for name, kind, optional in enums_of(cls):
            value = getattr(self, name)
            if not (isinstance(value, kind) or (optional and value is None)):
                found = member(kind, value, f"{cls.__name__}.{name}")
                object.__setattr__(self, name, found)


@cache
def enums_of(cls: type) -> tuple[tuple[str, type[Enum], bool], ...]:
    """The fields of a dataclass that hold an enum: name, enum, and whether they may be None."""
    hints = get_type_hints(cls)
    found = []
    for field in fields(cls):
        hint = hints[field.name]
        for kind in get_args(hint) if isinstance(hint, UnionType) else (hint,):
            if isinstance(kind, type) and issubclass(kind, Enum):
                found.append((field.name, kind, type(None) in get_args(hint)))
    return tuple(found)
