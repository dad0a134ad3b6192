"""Read values from JSON; each function raises `LayoutFormError` that names the place of a fault."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from restow.broker.errors import LayoutFormError

Json = Mapping[str, Any]


def malformed(where: str, fault: str) -> LayoutFormError:
    """Return the error for a fault."""
    return LayoutFormError(f"{where}: {fault}", place=where)


def get(item: object, key: str, where: str) -> Any:
    """Return the value of a required key."""
    data = mapping(item, where)
    if key not in data:
        raise malformed(where, f"{key!r} is missing")
    return data[key]


def name(data: object, where: str) -> str:
    """Return a non-empty text."""
    if not text(data, where):
        raise malformed(where, f"{data!r} is not a name")
    return str(data)


def text(data: object, where: str) -> str:
    """Return a text; refuse lone surrogates, which JSON can express and UTF-8 cannot."""
    if not isinstance(data, str) or any("\ud800" <= letter <= "\udfff" for letter in data):
        raise malformed(where, f"{_short(data)} is not a name")
    return data


def texts(data: object, where: str) -> tuple[str, ...]:
    """Return a list of names."""
    return tuple(name(word, place) for place, word in items(data, where))


def mapping(data: object, where: str) -> Json:
    """Return an object."""
    if not isinstance(data, Mapping):
        raise malformed(where, f"expected an object, got {type(data).__name__}")
    return data


def items(data: object, where: str) -> list[tuple[str, Any]]:
    """Return the items of a list, each with its place."""
    if not isinstance(data, Sequence) or isinstance(data, str | bytes):
        raise malformed(where, f"expected a list, got {type(data).__name__}")
    return [(f"{where}[{index}]", item) for index, item in enumerate(data)]


def integer(data: object, where: str) -> int:
    """Return an integer."""
    if not isinstance(data, int) or isinstance(data, bool):
        raise malformed(where, f"{_short(data)} is not an integer")
    return data


def flag(data: object, where: str) -> bool:
    """Return a boolean."""
    if not isinstance(data, bool):
        raise malformed(where, f"{_short(data)} is neither true nor false")
    return data


def integers(data: object, where: str) -> tuple[int, ...]:
    """Return a list of integers."""
    return tuple(integer(value, place) for place, value in items(data, where))


def _short(data: object) -> str:
    """Shorten a value for a message."""
    shown = repr(data)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
