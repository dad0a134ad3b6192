"""The values of a layout (fields, regions, shards, ranks), and the limits of their sizes."""

from __future__ import annotations

from collections.abc import Iterator
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
"""Shards of all ranks; the same limit holds for fields and for regions."""
MAX_GROUPS = 1024
MAX_WORD_LENGTH = 256
"""Length of each part of a model's identity except the name; error messages show them whole."""
MAX_AXES = 16
MAX_PAGE_BYTES = 1 << 36
MAX_AXIS_SIZE = MAX_PAGE_BYTES * MAX_RANKS
MAX_PAGES_PER_BLOCK = 1 << 20
MAX_BLOCK = 2**31 - 1
"""Block ids travel as int32."""
MAX_TOKENS = 2**31 - 1
"""Positions travel as int32."""
MAX_RUNS = 1 << 21
"""Runs of bytes in all pages of different form together."""
MAX_BOXES_OF_A_FIELD = 4096
MAX_TAPS = 256
MAX_HIDDEN = 1 << 20
MAX_CHANNELS = 1 << 32


class DType(IntEnum):
    """An element type; its number travels in piece tables.

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
    """Two numbers in a byte; axes count pairs, so that no cut separates the two numbers of a
    byte."""

    @property
    def label(self) -> str:
        """Return the dtype's name, for example ``bfloat16``."""
        return self.name.lower()

    @property
    def itemsize_bytes(self) -> int:
        """Return the bytes of an element."""
        return _ITEM_BYTES.get(self, 1)

    @property
    def castable(self) -> bool:
        """Return whether elements may be converted to another castable type in transit."""
        return self in (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32)

    def holds(self, other: DType) -> bool:
        """Return whether this type represents every value of ``other`` exactly.

        >>> DType.FLOAT32.holds(DType.BFLOAT16), DType.FLOAT16.holds(DType.BFLOAT16)
        (True, False)
        """
        return self is other or (self is DType.FLOAT32 and other.castable)

    @classmethod
    def _missing_(cls, value: object) -> DType | None:
        """Return the type with this name."""
        return cls.__members__.get(value.upper()) if isinstance(value, str) else None

    @classmethod
    def parse(cls, name: str) -> DType:
        """Return the type with this name; `LayoutFormError` lists the known names."""
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
    """An entry per token, in pages: keys and values."""
    SNAPSHOT = "snapshot"
    """A single value at a position, whatever the prompt's length: conv and SSM states."""


UNKNOWN_SCALES = "unknown"
"""The scales of a field that has static ones which nothing identifies."""


@dataclass(frozen=True, slots=True)
class Field(Worded):
    """A logical tensor of the state, independent of tensor parallelism.

    Both engines give it the same ``name`` (such as ``layers.7.conv.x``) and ``kind``. ``axes``
    names its axes and ``shape`` has their sizes; per-token fields omit the token axis. With
    ``window_tokens``, only that many tokens before the position are needed (sliding window); 0
    means all.

    ``scales`` describes the factors by which elements are multiplied, such as "static v1". The same
    bytes with other factors are other values, so both engines must name the same scales. An empty
    text means that elements are the values. A broker refuses an engine with scales that are
    "unknown": its layout is for looking at.

    ``draft`` names the draft model (MTP, EAGLE) of the field, by any text that is equal exactly if
    the draft's weights are equal. A side may lack the field or have another draft; D's field then
    begins zeroed. An empty text means that the field belongs to the model itself, and both sides
    must have it.
    """

    name: str
    kind: Kind
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    window_tokens: int = 0
    scales: str = ""
    draft: str = ""

    def entries(self, tokens: int, block_tokens: int = 1) -> int:
        """Return how many entries a handoff of ``tokens`` moves into whole blocks."""
        if self.kind is Kind.SNAPSHOT:
            return 1
        first = max(tokens - self.window_tokens, 0) if self.window_tokens else 0
        return tokens - first + first % block_tokens


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """The identity of a model; engines can hand over to each other if all four parts are equal.

    ``revision`` is any text that is equal exactly if the weights are equal; an empty revision
    equals only itself and says nothing about weights. ``adapter`` names the adapter that all
    requests of the engine use, ``quantisation`` how weights are stored. An empty text means
    none.
    """

    name: str
    revision: str = ""
    adapter: str = ""
    quantisation: str = ""

    def __str__(self) -> str:
        """Format the identity for people.

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
        """Return the identity without its revision."""
        return replace(self, revision="") if self.revision else self

    def check_weights(self) -> None:
        """Raise `WeightsUnknownError` if the identity has no revision.

        A router that pairs two engines for a handoff vouches that their weights are equal. Nobody
        vouches for states that are found by content.
        """
        if not self.revision:
            raise WeightsUnknownError(
                f"model {self} has no revision, so its states cannot be told from states of other "
                f"weights and are not found by content: give its layouts a revision",
                model=self.name,
            )


class Pool(NamedTuple):
    """The engines of a tenant that serve the same model and may hand over to each other.

    ``model`` has no revision, because an engine's revision may change while it runs.
    """

    tenant: str
    model: ModelIdentity

    @classmethod
    def of(cls, tenant: str, model: ModelIdentity) -> Pool:
        """Return the pool of an engine that serves ``model``, whatever its weights."""
        return cls(tenant, model.of_any_revision)


IDENTITY_PARTS = ("revision", "adapter", "quantisation")
"""The parts of an identity beside the name."""


@dataclass(frozen=True, slots=True)
class Model:
    """What both engines must agree on: an identity and the ``fields`` of the state.

    ``name``, ``revision``, ``adapter`` and ``quantisation`` are those of `ModelIdentity`.

    ``inputs`` are not part of the state. They are the last rows that a recurrent layer read,
    ``[tap, hidden]``, the oldest row first, and zero before the prompt. Conv windows can be
    recomputed from them, so an engine may keep them beside the state, or list none.
    """

    name: str
    fields: tuple[Field, ...]
    inputs: tuple[Field, ...] = ()
    revision: str = ""
    adapter: str = ""
    quantisation: str = ""

    @property
    def identity(self) -> ModelIdentity:
        """Return the model's identity."""
        return ModelIdentity(self.name, self.revision, self.adapter, self.quantisation)


@dataclass(frozen=True, slots=True)
class Region:
    """Registered memory cut into pages, by its ``name``.

    Page ``i`` begins ``i`` times ``page_stride_bytes`` after the first one.
    ``group`` names the list of block ids that addresses the region; a list can serve many regions.
    A block has ``pages_per_block`` pages: with ``r`` pages, block ``b`` is the pages ``b * r`` to
    ``b * r + r - 1``. ``page_tokens`` is None if a page holds snapshots. ``null_block`` is the id
    that stands in lists where a request has no block; None if the region has none. With
    ``whole_blocks`` the engine keeps full blocks for other prompts with the same beginning, so the
    first block of a window is filled from its beginning.

    Under context parallelism, ranks divide the tokens of a prompt, and pages hold the tokens of a
    single `TokenClass`: part ``context_part`` of ``context_parts``, dealt ``interleave_tokens`` at
    a time. A page then holds ``page_tokens`` of these tokens, and a list of block ids covers
    ``context_parts`` times as many tokens.

    A region without a group is constant: it has a single page, number 0, which no request owns. It
    holds weights for projections, and no peer reads it.
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
        """Return which tokens of a prompt the pages hold."""
        if self.context_parts == 1:
            return ALL_TOKENS
        return TokenClass(self.context_parts, self.context_part, self.interleave_tokens)

    @property
    def block_tokens(self) -> int:
        """Return the tokens that a block spans, including the tokens of other ranks.

        0 means that a block holds a snapshot.
        """
        return (self.page_tokens or 0) * self.pages_per_block * self.context_parts

    @property
    def constant(self) -> bool:
        """Return whether the region has no group, so that no list of block ids addresses it."""
        return not self.group


@dataclass(frozen=True, slots=True)
class Shard(Worded):
    """The ``box`` of a ``field`` that a rank holds, and its place in a page of its ``region``.

    ``box`` has a `Span` per axis of the field, and elements are of type ``dtype``.
    The element at box index ``(i, j, ...)`` and, for a per-token field, token ``t`` of the page is
    at ``offset_bytes + i * strides_bytes[0] + j * strides_bytes[1] + ... + t *
    token_stride_bytes``. It begins at ``offset_bytes``; ``strides_bytes`` has a step per axis, and
    ``token_stride_bytes`` is the step from token to token, or None for a snapshot.
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
    """Memory in a page of snapshots that is no state, and is zeroed when a state arrives.

    The rows of a conv window for speculative tokens are an example. Element ``(i, j, ...)`` of
    ``sizes`` is at ``offset_bytes + i * strides_bytes[0] + j * strides_bytes[1] + ...``.
    """

    region: str
    dtype: DType
    offset_bytes: int
    sizes: tuple[int, ...]
    strides_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Projection(Worded):
    """A rank's in-projection weights: their product with ``input`` is the ``box`` of ``field``.

    The box is the box of a shard of the rank, with all taps. The weight at box index
    ``(i, j, ...)``, without taps, and hidden index ``h`` is at ``offset_bytes + i *
    strides_bytes[0] + j * strides_bytes[1] + ... + h * itemsize`` of a constant region. The last
    stride is the stride of the hidden axis, which has no gaps.
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
    """All ``regions`` and ``shards`` of the rank numbered ``rank``, and what else it keeps.

    ``scratch`` is memory that is zeroed when a state arrives.
    ``inputs`` are shards of the model's inputs, each whole. ``projections`` are the weights with
    which the rank can recompute conv windows from another engine's inputs.
    """

    rank: int
    regions: tuple[Region, ...]
    shards: tuple[Shard, ...]
    scratch: tuple[Scratch, ...] = ()
    inputs: tuple[Shard, ...] = ()
    projections: tuple[Projection, ...] = ()

    def region(self, name: str) -> Region:
        """Return the region with this name; `check_layout` has checked that it exists."""
        return next(region for region in self.regions if region.name == name)

    def held(self) -> Iterator[tuple[Region, Shard]]:
        """Yield each shard of a checked layout with the region that it lies in."""
        regions = {region.name: region for region in self.regions}
        for shard in self.shards:
            yield regions[shard.region], shard


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Layout:
    """All shards of all ``ranks`` of an engine of ``model``.

    A layout has no addresses, so replicas have equal digests. ``encoded`` stays empty; it is for
    messages of the broker.
    """

    model: Model
    ranks: tuple[RankLayout, ...]
    encoded: bytes = field(default=b"", compare=False, repr=False)
    """The message that the layout came in, or empty; other processes receive this message."""
