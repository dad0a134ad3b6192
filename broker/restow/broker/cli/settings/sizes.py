"""Read sizes in bytes as people write them."""

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

    Raises `typer.BadParameter` if the text is no size.

    >>> parse_size("8GiB"), parse_size("1.5 kB"), parse_size("4096")
    (8589934592, 1500, 4096)
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2] not in _UNITS:
        raise typer.BadParameter(f"{text!r} is no size: write it like 8GiB or 500MB")
    size = int(float(match[1]) * _UNITS[match[2]])
    if size < 1:
        raise typer.BadParameter(f"{text!r} is less than a byte")
    return size
