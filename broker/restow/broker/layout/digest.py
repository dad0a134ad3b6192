"""The name of a layout's content."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from operator import attrgetter
from typing import Any

from restow.broker.layout.dtype import DType
from restow.broker.layout.schema import MODEL, RANK, Attribute, Sort
from restow.broker.layout.values import Layout

_REGIONS, _SHARDS, _SCRATCH, _INPUTS, *_OTHERS = RANK.nested
_OF_RANK = (_REGIONS, _SHARDS, _INPUTS, _SCRATCH, *_OTHERS)
"""Inputs come next to the shards, unlike in JSON."""
_LABELS = {dtype: dtype.label for dtype in DType}
_ENDS = attrgetter("start", "stop")
_WRITE: dict[Sort, Callable[[Any], object]] = {
    Sort.BOX: lambda box: list(map(_ENDS, box)),
    Sort.DTYPE: _LABELS.__getitem__,
    Sort.KIND: lambda kind: kind.value,
}


def digest(layout: Layout) -> str:
    """SHA-256 over the layout's numbers and names: equal layouts, equal digests, anywhere.

    The text is one line of ASCII for each field, region and shard, in the layout's order: quoted
    names and integers, so that two layouts never share a text. What is `later` follows in lines of
    its own, where it is not the default.
    """
    model = layout.model
    lines = _lines("layout", [model], MODEL.attributes)
    for part in MODEL.nested:
        told = [one for one in part.record.attributes if one.of_inputs or part.name != "inputs"]
        lines += _lines(part.word, getattr(model, part.name), told)
    for rank in layout.ranks:
        lines += _lines("rank", [rank], RANK.attributes)
        for part in _OF_RANK:
            lines += _lines(part.word, getattr(rank, part.name), part.record.attributes)
    return hashlib.sha256("\n".join(lines).encode("ascii")).hexdigest()


def _lines(word: str, values: Sequence[object], told: Iterable[Attribute]) -> list[str]:
    """One line a value, made of columns: that is quicker than value by value.

    Then one for each value that has more to tell than the defaults of what is `later`.
    """
    told = tuple(told)
    columns = [_column(values, one) for one in told if not one.later]
    lines = [ascii(line) for line in zip(repeat(word), *columns, strict=False)]
    later = [one for one in told if one.later]
    defaults = [one.default for one in later]
    for number, value in enumerate(values if later else ()):
        held = [getattr(value, one.name) for one in later]
        if held != defaults:
            lines.append(ascii((f"{word} later", number, *held)))
    return lines


def _column(values: Sequence[object], one: Attribute) -> Iterable[object]:
    column, write = map(attrgetter(one.name), values), _WRITE.get(one.sort)
    return map(write, column) if write else column
