"""Bounds of a layout: so that whatever numbers come in, the work is bounded."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from typing import NamedTuple

import numpy as np

from restow.broker.errors import LayoutFormError, WeightsUnknownError
from restow.broker.layout.span import Box
from restow.broker.layout.token_class import ALL_TOKENS, TokenClass
from restow.broker.words import Worded

MAX_RANKS = 1024
MAX_RANK_NUMBER = 2**31 - 1
MAX_SHARDS = 1 << 18
"""Of all ranks; and as many fields, and as many regions."""
MAX_GROUPS = 1024
MAX_WORD_LENGTH = 256
"""Of each part of a model's identity beside its name: errors give them whole."""
MAX_AXES = 16
MAX_PAGE_BYTES = 1 << 36
MAX_AXIS_SIZE = MAX_PAGE_BYTES * MAX_RANKS
MAX_PAGES_PER_BLOCK = 1 << 20
MAX_BLOCK = 2**31 - 1
"""Block ids travel as int32."""
MAX_TOKENS = 2**31 - 1
"""Positions travel as int32."""
MAX_RUNS = 1 << 21
"""Runs of bytes that all pages of different form fall into, together."""
MAX_BOXES_OF_A_FIELD = 4096
MAX_TAPS = 256
MAX_HIDDEN = 1 << 20
MAX_CHANNELS = 1 << 32


class DType(IntEnum):
    """An element type; the number is what travels in piece tables.

    >>> DType.parse("bfloat16").itemsize_bytes
    2
    """

    UINT8 = 1
    INT8 = 2
    FLOAT8_E4M3FN = 3
    FLOAT8_E5M2 = 4
    FLOAT16 = 5
    BFLOAT16 = 6
    FLOAT32 = 7
    FLOAT4_E2M1FN_X2 = 8
    """Two numbers in a byte: axes count pairs, so that no cut falls between two of one byte."""

    @property
    def label(self) -> str:
        """The dtype's name, for example ``bfloat16``."""
        return self.name.lower()

    @property
    def itemsize_bytes(self) -> int:
        """Bytes of one element."""
        return _ITEM_BYTES.get(self, 1)

    @property
    def castable(self) -> bool:
        """Whether its elements may be turned into another castable type on the way."""
        return self in (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32)

    def holds(self, other: DType) -> bool:
        """Whether every value of ``other`` is a value of this type.

        >>> DType.FLOAT32.holds(DType.BFLOAT16), DType.FLOAT16.holds(DType.BFLOAT16)
        (True, False)
        """
        return self is other or (self is DType.FLOAT32 and other.castable)

    @classmethod
    def _missing_(cls, value: object) -> DType | None:
        """The type of that name."""
        return cls.__members__.get(value.upper()) if isinstance(value, str) else None

    @classmethod
    def parse(cls, name: str) -> DType:
        """Read a dtype's name; `LayoutFormError` lists the known ones."""
        try:
            return cls[name.upper()]
        except KeyError:
            known = ", ".join(dtype.label for dtype in cls)
            raise LayoutFormError(f"dtype {name!r} is unknown; known are {known}") from None


_ITEM_BYTES = {DType.FLOAT16: 2, DType.BFLOAT16: 2, DType.FLOAT32: 4}
ITEM_BYTES = np.array([0, *(dtype.itemsize_bytes for dtype in DType)], np.int64)
"""Bytes of an element by `DType` number."""


class Kind(StrEnum):
    """How a field grows with the prompt."""

    PER_TOKEN = "per_token"  # noqa: S105
    """One entry a token, paged: keys and values."""
    SNAPSHOT = "snapshot"
    """One value at a position, whatever the prompt's length: conv and SSM states."""


@dataclass(frozen=True, slots=True)
class Field(Worded):
    """One logical tensor of the state, independent of tensor parallelism.

    ``shape`` has one size an axis; the token axis of a per-token field is left out. Of a per-token
    field with ``window_tokens`` only so many tokens before the position are needed (sliding
    window); 0: all.

    ``scales`` says in words which factors make values of the elements, such as "static v1": equal
    bytes under other factors are other values, so both engines must say the same. "": the elements
    are the values.

    ``draft`` names the draft model (MTP, EAGLE) whose field it is, by any text that is equal
    exactly when its weights are: a side may lack it or have another one, and then D's begins
    zeroed. "": it is the model's own, and both sides must have it.
    """

    name: str
    kind: Kind
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    window_tokens: int = 0
    scales: str = ""
    draft: str = ""

    def entries(self, tokens: int, block_tokens: int = 1) -> int:
        """How many entries a handoff of ``tokens`` moves into whole blocks of ``block_tokens``."""
        if self.kind is Kind.SNAPSHOT:
            return 1
        first = max(tokens - self.window_tokens, 0) if self.window_tokens else 0
        return tokens - first + first % block_tokens


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Which model an engine serves: engines hand over to each other if all four are equal.

    ``revision`` is any text that is equal exactly when the weights are; "" in it says nothing of
    them, and is equal to nothing else. ``adapter`` is one that all of the engine's requests go
    through, ``quantisation`` how its weights are stored; "": none.
    """

    name: str
    revision: str = ""
    adapter: str = ""
    quantisation: str = ""

    def __str__(self) -> str:
        """For people.

        >>> str(ModelIdentity("mamba2", "v1"))
        "'mamba2' (revision 'v1', no adapter, no quantisation)"
        """
        parts = (
            f"{part} {value!r}" if (value := getattr(self, part)) else f"no {part}"
            for part in IDENTITY_PARTS
        )
        return f"{self.name!r} ({', '.join(parts)})"

    @property
    def of_any_revision(self) -> ModelIdentity:
        """Return the model whatever its weights are."""
        return replace(self, revision="") if self.revision else self

    def check_weights(self) -> None:
        """Raise `WeightsUnknownError` where no revision tells the weights from others.

        Two that a router sends one prompt's state between may still be alike by its word; states
        that anybody finds by their content may not.
        """
        if not self.revision:
            raise WeightsUnknownError(
                f"model {self} has no revision, so that nobody can tell its states from those of "
                f"other weights: they are not found by their content. Give its layouts a revision",
                model=self.name,
            )


class Pool(NamedTuple):
    """The engines of one tenant that serve one model: they may hand over to each other.

    Its ``model`` has no revision: an engine's may change while it lives.
    """

    tenant: str
    model: ModelIdentity

    @classmethod
    def of(cls, tenant: str, model: ModelIdentity) -> Pool:
        """Return the pool that an engine of ``model`` belongs to, whatever its weights."""
        return cls(tenant, model.of_any_revision)


IDENTITY_PARTS = ("revision", "adapter", "quantisation")
"""Beside the name."""


@dataclass(frozen=True, slots=True)
class Model:
    """What both engines must agree on: an identity and the fields of its state.

    ``inputs`` are no state: the last rows that a recurrent layer read, ``[tap, hidden]``, the
    oldest first, and zero before the prompt. Its conv windows can be rebuilt from them, so an
    engine may keep them beside the state, or list none.
    """

    name: str
    fields: tuple[Field, ...]
    inputs: tuple[Field, ...] = ()
    revision: str = ""
    adapter: str = ""
    quantisation: str = ""

    @property
    def identity(self) -> ModelIdentity:
        """Which model it is."""
        return ModelIdentity(self.name, self.revision, self.adapter, self.quantisation)


@dataclass(frozen=True, slots=True)
class Region:
    """Registered memory cut into pages: page ``i`` begins at ``base + i * page_stride_bytes``.

    ``group`` names the list of page ids that addresses it (one list serves many regions).
    An engine's id counts blocks of ``pages_per_block`` pages: block ``b`` is the pages
    ``b * r .. b * r + r - 1``. ``page_tokens`` is None where a page holds snapshots.
    ``null_block`` is the id that stands in lists where a request has no block; None: no id does.
    With ``whole_blocks`` the engine keeps full blocks for other prompts that begin alike: the first
    block of a window is filled from its beginning.

    Where ranks share out the tokens of a prompt (context parallelism), the pages hold those of one
    `TokenClass` alone: number ``context_part`` of ``context_parts``, which take turns by
    ``interleave_tokens``. A page holds ``page_tokens`` of these, and a list of block ids reaches
    ``context_parts`` times as far.

    A region without a group is constant: one page, number 0, that no request owns. It holds weights
    for projections, and no peer reads it.
    """

    name: str
    group: str
    page_stride_bytes: int
    page_tokens: int | None
    pages_per_block: int = 1
    null_block: int | None = None
    context_parts: int = 1
    context_part: int = 0
    interleave_tokens: int = 1
    whole_blocks: bool = False

    @property
    def tokens(self) -> TokenClass:
        """Which tokens of a prompt its pages hold."""
        if self.context_parts == 1:
            return ALL_TOKENS
        return TokenClass(self.context_parts, self.context_part, self.interleave_tokens)

    @property
    def block_tokens(self) -> int:
        """How many tokens of a prompt a block reaches over, those of other ranks among them.

        0: it holds a snapshot.
        """
        return (self.page_tokens or 0) * self.pages_per_block * self.context_parts

    @property
    def constant(self) -> bool:
        """Whether no list of block ids addresses it."""
        return not self.group


@dataclass(frozen=True, slots=True)
class Shard(Worded):
    """The box of a field that a rank holds, and where it lies inside a page of its region.

    The element at box index ``(i, j, ...)`` and, for a per-token field, token ``t`` of the page
    is at ``offset_bytes + i * strides_bytes[0] + j * strides_bytes[1] + ... +
    t * token_stride_bytes``.
    """

    field: str
    box: Box
    dtype: DType
    region: str
    offset_bytes: int
    strides_bytes: tuple[int, ...]
    token_stride_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Scratch(Worded):
    """Memory inside a page of snapshots that is no state, and is zeroed when a state arrives.

    Such as the rows of a conv window that are kept for speculative tokens. Element ``(i, j, ...)``
    of ``sizes`` is at ``offset_bytes + i * strides_bytes[0] + j * strides_bytes[1] + ...``.
    """

    region: str
    dtype: DType
    offset_bytes: int
    sizes: tuple[int, ...]
    strides_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Projection(Worded):
    """In-projection weights of a rank: its ``box`` of ``field`` is their product with ``input``.

    The box is that of one of the rank's shards, with all taps. The weight of box index
    ``(i, j, ...)``, taps left out, and of hidden index ``h`` is at ``offset_bytes +
    i * strides_bytes[0] + j * strides_bytes[1] + ... + h * itemsize`` of a constant region: the
    last stride is that of the hidden axis, which lies there without gaps.
    """

    field: str
    box: Box
    input: str
    dtype: DType
    region: str
    offset_bytes: int
    strides_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankLayout:
    """All regions and shards of one rank, and what it keeps beside them.

    ``inputs`` are shards of the model's inputs, each whole; ``projections`` the weights with which
    the rank can rebuild conv windows from another engine's inputs.
    """

    rank: int
    regions: tuple[Region, ...]
    shards: tuple[Shard, ...]
    scratch: tuple[Scratch, ...] = ()
    inputs: tuple[Shard, ...] = ()
    projections: tuple[Projection, ...] = ()

    def region(self, name: str) -> Region:
        """The region of that name (`check_layout` has made sure that it exists)."""
        return next(region for region in self.regions if region.name == name)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Layout:
    """Every shard of every rank of an engine; no addresses, so replicas share one digest."""

    model: Model
    ranks: tuple[RankLayout, ...]
    encoded: bytes = field(default=b"", compare=False, repr=False)
    """The message that it came by; empty: by none. Another process is told it by this."""
