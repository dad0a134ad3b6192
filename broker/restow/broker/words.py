"""Convert the words of enums: a field accepts a member or its word, and refuses other words."""

from __future__ import annotations

from dataclasses import fields
from enum import Enum
from functools import cache
from types import UnionType
from typing import TypeVar, get_args, get_type_hints

from restow.broker.errors import WordUnknownError

E = TypeVar("E", bound=Enum)


def member(kind: type[E], value: object, where: str) -> E:
    """Return the member that ``value`` is or names.

    Raises `WordUnknownError`, which lists the accepted words.
    """
    if isinstance(value, kind):
        return value
    try:
        if isinstance(value, str):
            return kind(value)
    except ValueError:
        pass
    known = ", ".join(str(getattr(item, "label", item.value)) for item in kind)
    raise WordUnknownError(
        f"{where} is {value!r}; it must be one of {known} ({kind.__name__})", field=where
    )


class Worded:
    """A frozen dataclass whose enum fields also accept the members' words.

    Members are compared by identity, so a word that stayed a string would equal no member. Raises
    `WordUnknownError`. A subclass with its own ``__post_init__`` calls this ``__post_init__``
    first.
    """

    __slots__ = ()

    def __post_init__(self) -> None:
        """Replace words by enum members."""
        cls: type = type(self)
        for name, kind, optional in enums_of(cls):
            value = getattr(self, name)
            if not (isinstance(value, kind) or (optional and value is None)):
                enum_member = member(kind, value, f"{cls.__name__}.{name}")
                object.__setattr__(self, name, enum_member)


@cache
def enums_of(cls: type) -> tuple[tuple[str, type[Enum], bool], ...]:
    """Return the fields of a dataclass that hold an enum: name, enum, whether None is allowed."""
    hints = get_type_hints(cls)
    enums = []
    for field in fields(cls):
        hint = hints[field.name]
        for kind in get_args(hint) if isinstance(hint, UnionType) else (hint,):
            if isinstance(kind, type) and issubclass(kind, Enum):
                enums.append((field.name, kind, type(None) in get_args(hint)))
    return tuple(enums)
