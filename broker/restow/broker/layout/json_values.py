"""Values read out of JSON. Each raises `LayoutFormError` that names the place of what is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from restow.broker.errors import LayoutFormError

Json = Mapping[str, Any]


def malformed(where: str, what: str) -> LayoutFormError:
    """What to raise."""
    return LayoutFormError(f"{where}: {what}", place=where)


def get(item: object, key: str, where: str) -> Any:
    """A key that must be there."""
    data = mapping(item, where)
    if key not in data:
        raise malformed(where, f"{key!r} is missing")
    return data[key]


def name(data: object, where: str) -> str:
    """Text, not empty."""
    if not text(data, where):
        raise malformed(where, f"{data!r} is not a name")
    return str(data)


def text(data: object, where: str) -> str:
    """Text whose every character is a whole one: JSON can write halves, and nothing else can."""
    if not isinstance(data, str) or any("\ud800" <= letter <= "\udfff" for letter in data):
        raise malformed(where, f"{_short(data)} is not a name")
    return data


def texts(data: object, where: str) -> tuple[str, ...]:
    """A list of names."""
    return tuple(name(word, place) for place, word in items(data, where))


def mapping(data: object, where: str) -> Json:
    """An object."""
    if not isinstance(data, Mapping):
        raise malformed(where, f"expected an object, got {type(data).__name__}")
    return data


def items(data: object, where: str) -> list[tuple[str, Any]]:
    """The items of a list, each with its place."""
    if not isinstance(data, Sequence) or isinstance(data, str | bytes):
        raise malformed(where, f"expected a list, got {type(data).__name__}")
    return [(f"{where}[{index}]", item) for index, item in enumerate(data)]


def integer(data: object, where: str) -> int:
    """An integer."""
    if not isinstance(data, int) or isinstance(data, bool):
        raise malformed(where, f"{_short(data)} is not an integer")
    return data


def flag(data: object, where: str) -> bool:
    """True or false."""
    if not isinstance(data, bool):
        raise malformed(where, f"{_short(data)} is neither true nor false")
    return data


def integers(data: object, where: str) -> tuple[int, ...]:
    """A list of integers."""
    return tuple(integer(value, place) for place, value in items(data, where))


def _short(data: object) -> str:
    """A value as it goes into a message, however long it is."""
    shown = repr(data)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
