"""What a layout is made of, said once: JSON, digests and messages each walk these tables."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from enum import StrEnum, auto
from itertools import repeat
from operator import attrgetter
from typing import Any, Final, get_type_hints

from restow.broker.layout.span import Box
from restow.broker.layout.values import (
    IDENTITY_PARTS,
    DType,
    Field,
    Kind,
    Layout,
    Model,
    Projection,
    RankLayout,
    Region,
    Scratch,
    Shard,
)
from restow.broker.words import Worded

NEEDED: Final = object()
"""The default of what must be said."""


class Sort(StrEnum):
    """What an attribute holds; each form has its way to write one and to read it."""

    NAME = auto()
    """Text, not empty."""
    TEXT = auto()
    NUMBER = auto()
    FLAG = auto()
    NAMES = auto()
    NUMBERS = auto()
    BOX = auto()
    DTYPE = auto()
    KIND = auto()


@dataclass(frozen=True, slots=True)
class Attribute(Worded):
    """One attribute of a value, of the same name in messages.

    It is ``default`` where JSON says nothing, and where a message says zero, unless ``zero`` is a
    number like any other. ``key`` is its name in JSON, if that is another; ``sparse`` ones are left
    out of JSON where they are the default. ``of_inputs``: digests tell it of the model's inputs
    too. ``later`` ones came when there were digests: these, and messages, tell nothing of the
    default.
    """

    name: str
    sort: Sort
    default: Any = NEEDED
    zero: bool = False
    key: str = ""
    sparse: bool = False
    of_inputs: bool = True
    later: bool = False


@dataclass(frozen=True, slots=True)
class Nested:
    """A list of values inside of a value. ``word`` begins their lines in digests.

    JSON may leave one out that is not ``needed``.
    """

    name: str
    record: Record
    word: str
    needed: bool = False


@dataclass(frozen=True, slots=True)
class Record:
    """A class of values: its attributes in the order of JSON and digests, then what is in it."""

    of: type
    attributes: tuple[Attribute, ...]
    nested: tuple[Nested, ...] = ()


_SORTS: dict[object, Sort] = {
    bool: Sort.FLAG,
    int: Sort.NUMBER,
    int | None: Sort.NUMBER,
    tuple[str, ...]: Sort.NAMES,
    tuple[int, ...]: Sort.NUMBERS,
    Box: Sort.BOX,
    DType: Sort.DTYPE,
    Kind: Sort.KIND,
}


def _record(of: type, *nested: Nested, **more: dict[str, Any]) -> Record:
    """What the class says itself, and ``more`` of some attributes.

    Text without a default is a name.
    """
    hints, inside = get_type_hints(of), [one.name for one in nested]
    attributes = []
    for one in fields(of):
        if one.name not in inside:
            default = NEEDED if one.default is MISSING else one.default
            text = Sort.NAME if default is NEEDED else Sort.TEXT
            own = Attribute(one.name, _SORTS.get(hints[one.name], text), default)
            attributes.append(replace(own, **more.get(one.name, {})))
    return Record(of, tuple(attributes), nested)


FIELD = _record(
    Field,
    name={"key": "field"},
    window_tokens={"of_inputs": False},
    scales={"of_inputs": False},
    draft={"sparse": True, "of_inputs": False, "later": True},
)
MODEL = _record(
    Model,
    Nested("fields", FIELD, "field"),
    Nested("inputs", FIELD, "input field"),
    name={"sort": Sort.TEXT, "default": ""},
    **{part: {"sparse": True} for part in IDENTITY_PARTS},
)
REGION = _record(
    Region,
    group={"sort": Sort.TEXT},
    page_tokens={"default": None},
    null_block={"zero": True},
    **{
        name: {"sparse": True, "later": True}
        for name in ("context_parts", "context_part", "interleave_tokens", "whole_blocks")
    },
)
SHARD = _record(Shard)
SCRATCH = _record(Scratch)
PROJECTION = _record(Projection)
RANK = _record(
    RankLayout,
    Nested("regions", REGION, "region", needed=True),
    Nested("shards", SHARD, "shard", needed=True),
    Nested("scratch", SCRATCH, "scratch"),
    Nested("inputs", SHARD, "input"),
    Nested("projections", PROJECTION, "projection"),
)


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
