"""The schema of layouts, which JSON, digests and messages all follow."""

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
"""The default of a required attribute."""


class Sort(StrEnum):
    """The type of an attribute; each format writes and reads each sort in its own way."""

    NAME = auto()
    """Non-empty text."""
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
    """An attribute of a value; messages use the same name.

    It has the value ``default`` if JSON omits it, and if a message has zero, unless ``zero`` says
    that zero is a value like any other. ``key`` is its name in JSON if that differs. A ``sparse``
    attribute is omitted from JSON if it has the default. ``of_inputs`` says that digests also
    include it for the model's inputs. A ``later`` attribute was added after digests were in use:
    digests and messages omit it if it has the default.
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
    """A list of values inside of a value; ``word`` begins their lines in digests.

    JSON may omit the list unless it is ``needed``.
    """

    name: str
    record: Record
    word: str
    needed: bool = False


@dataclass(frozen=True, slots=True)
class Record:
    """A class of values: its attributes in the order of JSON and digests, then its nested lists."""

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
    """Return the record of a class; ``more`` overrides properties of some attributes.

    A text attribute without a default is a name.
    """
    hints, inside = get_type_hints(of), [part.name for part in nested]
    attributes = []
    for attribute in fields(of):
        if attribute.name not in inside:
            default = NEEDED if attribute.default is MISSING else attribute.default
            text = Sort.NAME if default is NEEDED else Sort.TEXT
            own = Attribute(attribute.name, _SORTS.get(hints[attribute.name], text), default)
            attributes.append(replace(own, **more.get(attribute.name, {})))
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
"""Digests have inputs next to the shards, unlike JSON."""
_LABELS = {dtype: dtype.label for dtype in DType}
_ENDS = attrgetter("start", "stop")
_WRITE: dict[Sort, Callable[[Any], object]] = {
    Sort.BOX: lambda box: list(map(_ENDS, box)),
    Sort.DTYPE: _LABELS.__getitem__,
    Sort.KIND: lambda kind: kind.value,
}


def digest(layout: Layout) -> str:
    """Return the SHA-256 of ``layout``: equal layouts have equal digests on every machine.

    The hashed text has a line of ASCII for each field, region and shard, in the layout's order.
    Lines consist of quoted names and integers, so that different layouts have different texts.
    Attributes that are `later` follow in lines of their own if they differ from their defaults.
    """
    model = layout.model
    lines = _lines("layout", [model], MODEL.attributes)
    for part in MODEL.nested:
        told = [
            attribute
            for attribute in part.record.attributes
            if attribute.of_inputs or part.name != "inputs"
        ]
        lines += _lines(part.word, getattr(model, part.name), told)
    for rank in layout.ranks:
        lines += _lines("rank", [rank], RANK.attributes)
        for part in _OF_RANK:
            lines += _lines(part.word, getattr(rank, part.name), part.record.attributes)
    return hashlib.sha256("\n".join(lines).encode("ascii")).hexdigest()


def _lines(word: str, values: Sequence[object], told: Iterable[Attribute]) -> list[str]:
    """Return a line per value; building columns first is faster than going value by value.

    A further line follows for each value whose `later` attributes differ from their defaults.
    """
    told = tuple(told)
    columns = [_column(values, attribute) for attribute in told if not attribute.later]
    lines = [ascii(line) for line in zip(repeat(word), *columns, strict=False)]
    later = [attribute for attribute in told if attribute.later]
    defaults = [attribute.default for attribute in later]
    for number, value in enumerate(values if later else ()):
        held = [getattr(value, attribute.name) for attribute in later]
        if held != defaults:
            lines.append(ascii((f"{word} later", number, *held)))
    return lines


def _column(values: Sequence[object], attribute: Attribute) -> Iterable[object]:
    column, write = map(attrgetter(attribute.name), values), _WRITE.get(attribute.sort)
    return map(write, column) if write else column
