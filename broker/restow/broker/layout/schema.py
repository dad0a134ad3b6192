"""What a layout is made of, said once: JSON, digests and messages each walk these tables."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields, replace
from enum import StrEnum, auto
from typing import Any, Final, get_type_hints

from restow.broker.layout.dtype import DType
from restow.broker.layout.span import Box
from restow.broker.layout.values import (
    IDENTITY_PARTS,
    Field,
    Kind,
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
