"""What a layout is made of, said once: JSON, digests and messages each walk these tables."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum, auto
from typing import Any, Final

from restow.broker.layout.values import (
    IDENTITY_PARTS,
    Field,
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
    out of JSON when empty. ``of_inputs``: digests tell it of the model's inputs too.
    """

    name: str
    sort: Sort
    default: Any = NEEDED
    zero: bool = False
    key: str = ""
    sparse: bool = False
    of_inputs: bool = True


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


FIELD = Record(
    Field,
    (
        Attribute("name", Sort.NAME, key="field"),
        Attribute("kind", Sort.KIND),
        Attribute("axes", Sort.NAMES),
        Attribute("shape", Sort.NUMBERS),
        Attribute("window_tokens", Sort.NUMBER, 0, of_inputs=False),
        Attribute("scales", Sort.TEXT, "", of_inputs=False),
    ),
)
MODEL = Record(
    Model,
    (
        Attribute("name", Sort.TEXT, ""),
        *(Attribute(part, Sort.TEXT, "", sparse=True) for part in IDENTITY_PARTS),
    ),
    (Nested("fields", FIELD, "field"), Nested("inputs", FIELD, "input field")),
)
REGION = Record(
    Region,
    (
        Attribute("name", Sort.NAME),
        Attribute("group", Sort.TEXT),
        Attribute("page_stride_bytes", Sort.NUMBER),
        Attribute("page_tokens", Sort.NUMBER, None),
        Attribute("pages_per_block", Sort.NUMBER, 1),
        Attribute("null_block", Sort.NUMBER, None, zero=True),
    ),
)
SHARD = Record(
    Shard,
    (
        Attribute("field", Sort.NAME),
        Attribute("box", Sort.BOX),
        Attribute("dtype", Sort.DTYPE),
        Attribute("region", Sort.NAME),
        Attribute("offset_bytes", Sort.NUMBER),
        Attribute("strides_bytes", Sort.NUMBERS),
        Attribute("token_stride_bytes", Sort.NUMBER, None),
    ),
)
SCRATCH = Record(
    Scratch,
    (
        Attribute("region", Sort.NAME),
        Attribute("dtype", Sort.DTYPE),
        Attribute("offset_bytes", Sort.NUMBER),
        Attribute("sizes", Sort.NUMBERS),
        Attribute("strides_bytes", Sort.NUMBERS),
    ),
)
PROJECTION = Record(
    Projection,
    (
        Attribute("field", Sort.NAME),
        Attribute("box", Sort.BOX),
        Attribute("input", Sort.NAME),
        Attribute("dtype", Sort.DTYPE),
        Attribute("region", Sort.NAME),
        Attribute("offset_bytes", Sort.NUMBER),
        Attribute("strides_bytes", Sort.NUMBERS),
    ),
)
RANK = Record(
    RankLayout,
    (Attribute("rank", Sort.NUMBER),),
    (
        Nested("regions", REGION, "region", needed=True),
        Nested("shards", SHARD, "shard", needed=True),
        Nested("scratch", SCRATCH, "scratch"),
        Nested("inputs", SHARD, "input"),
        Nested("projections", PROJECTION, "projection"),
    ),
)
