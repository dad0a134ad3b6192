"""`show_readings` says on stderr what of a model's config was taken from where, and assumed."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from restow.broker.printable import shown

if TYPE_CHECKING:
    from restow.broker.families.hf import Reading, Readings

_MAX_VALUE_LENGTH = 32


def show_readings(readings: Readings, as_json: bool) -> None:
    """Print a line for each key with its value and file, or all as one JSON document."""
    if as_json:
        sys.stderr.write(json.dumps({"readings": [asdict(one) for one in readings]}) + "\n")
        return
    lines = [(shown(one.key), _short(one.value), _origin(one)) for one in readings]
    keys, values = (max((len(line[i]) for line in lines), default=0) for i in (0, 1))
    for key, value, origin in lines:
        sys.stderr.write(f"{key:<{keys}}  {value:<{values}}  {origin}\n")


def _short(value: object) -> str:
    text = shown(value if isinstance(value, str) else json.dumps(value))
    return text if len(text) <= _MAX_VALUE_LENGTH else text[: _MAX_VALUE_LENGTH - 3] + "..."


def _origin(one: Reading) -> str:
    where = one.file or "assumed"
    return shown(f"{where}: {one.note}" if one.note else where)
