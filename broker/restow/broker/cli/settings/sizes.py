"""Sizes in bytes as people write them."""

from __future__ import annotations

import re

import typer

_UNITS = {
    **{"": 1, "B": 1},
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)},
    **{f"{letter}B": 1000**power for power, letter in enumerate("kMGT", 1)},
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)")


def parse_size(text: str) -> int:
    """Return the bytes of a size with its unit.

    Raises `typer.BadParameter` for what is none.

    >>> parse_size("8GiB"), parse_size("1.5 kB"), parse_size("4096")
    (8589934592, 1500, 4096)
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None or found[2] not in _UNITS:
        raise typer.BadParameter(f"{text!r} is no size: write it like 8GiB or 500MB")
    size = int(float(found[1]) * _UNITS[found[2]])
    if size < 1:
        raise typer.BadParameter(f"{text!r} is less than a byte")
    return size
