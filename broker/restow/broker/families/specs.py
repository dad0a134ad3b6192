"""Attention layers, the scales of their KV cache, and the model that all layers make up."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from restow.broker.errors import LayoutFormError
from restow.broker.families.recurrent import Recurrence, RecurrentSpec
from restow.broker.layout import DType, Field, Kind, Model
from restow.broker.layout.values import UNKNOWN_SCALES
from restow.broker.words import Worded

PACKED = DType.FLOAT4_E2M1FN_X2
QUANTISED = (DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2, DType.INT8, PACKED)
"""Types to which elements of a KV cache are rounded after division by a scale."""
SCALE_DTYPE = DType.FLOAT32
SIXTEENTH_DTYPE = DType.FLOAT8_E4M3FN
BLOCK_DIM = 16
"""Elements of a head that share a float4 scale."""


class ScaleKind(StrEnum):
    """The place of the scales of a KV cache."""

    NONE = "none"
    """Elements are the values, as if every scale were 1.0."""
    STATIC = "static"
    """From the checkpoint, or calibrated once. They are not state: both engines must have the same
    scales (vLLM `fp8`, `fp8_e4m3`, `fp8_e5m2`: `layer._k_scale` and `_v_scale`)."""
    PER_TOKEN_HEAD = "per-token-head"  # noqa: S105
    """A float32 for each token and head, in the cache and moved with it (vLLM
    `fp8_per_token_head`, `int8_per_token_head`)."""
    PER_BLOCK = "per-block"
    """A float32 for each token and block of its latent, in the cache and moved with it (vLLM
    `fp8_ds_mla`)."""
    PER_16 = "per-16"
    """A float8_e4m3fn for each token, head and 16 elements, in the cache and moved with it, and a
    static scale for all, which must be equal on both engines (vLLM `nvfp4`)."""
    UNKNOWN = "unknown"
    """Static ones may be in the checkpoint, and nothing identifies them. The layout is for looking
    at: a broker refuses its engine."""


NAMED = (ScaleKind.STATIC, ScaleKind.PER_16)
"""Kinds with a static part."""


@dataclass(frozen=True, slots=True)
class Scales(Worded):
    """The scales of a layer's KV cache.

    ``fingerprint`` identifies static scales: a text that is equal on two engines exactly when
    their scales are equal, such as a checkpoint's revision.
    """

    kind: ScaleKind = ScaleKind.NONE
    fingerprint: str = ""

    @property
    def per_token(self) -> bool:
        """Whether the cache has a scale for each token and head."""
        return self.kind is ScaleKind.PER_TOKEN_HEAD

    @property
    def words(self) -> str:
        """The description of the scales in a `Field`."""
        if self.kind is ScaleKind.STATIC:
            return f"static {self.fingerprint}"
        if self.kind is ScaleKind.PER_16:
            return f"per token, head and 16 elements, static {self.fingerprint}"
        if self.kind is ScaleKind.UNKNOWN:
            return UNKNOWN_SCALES
        return "per token and head" if self.per_token else ""

    def check(self, dtype: DType) -> None:
        """Raise `LayoutFormError` for a type without scales, or a missing fingerprint."""
        if (self.kind in NAMED) != bool(self.fingerprint):
            raise LayoutFormError(
                f"scales of kind {self.kind} with fingerprint {self.fingerprint!r}: static scales "
                f"and scales per 16 elements need a fingerprint that P and D share, and other "
                f"scales have none"
            )
        if (self.kind is ScaleKind.PER_16) != (dtype is PACKED):
            raise LayoutFormError(
                f"KV of type {dtype.label} with scales of kind {self.kind}: {PACKED.label} has "
                f"scales {ScaleKind.PER_16}, and no other type has these scales"
            )
        if self.kind is not ScaleKind.NONE and dtype not in QUANTISED:
            known = ", ".join(quantised.label for quantised in QUANTISED)
            raise LayoutFormError(
                f"KV of type {dtype.label} has no scales, but {self.kind} scales are "
                f"given: give it a type of {known}, or leave the scales out"
            )


NO_SCALES = Scales()


@dataclass(frozen=True, slots=True)
class AttentionSpec(Worded):
    """Grouped-query attention: keys and values of ``kv_heads`` heads, one entry per token.

    Heads of layer number ``layer`` have ``head_dim`` elements of type ``dtype``.
    With a sliding window the next token sees only ``window_tokens`` tokens before it; 0 means all.
    ``scales`` are for float8, int8 and float4 (stored as pairs of elements). ``value_dim`` is the
    width of values if it differs from the width of keys; 0 means the same width.
    """

    layer: int
    kv_heads: int
    head_dim: int
    dtype: DType
    window_tokens: int = 0
    scales: Scales = NO_SCALES
    value_dim: int = 0

    def __post_init__(self) -> None:
        """Refuse scales of a type that has no scales."""
        Worded.__post_init__(self)
        self.scales.check(self.dtype)
        if self.scales.kind is ScaleKind.PER_BLOCK:
            raise LayoutFormError("keys and values of heads have no scales per block")
        if self.packed and (self.head_dim % BLOCK_DIM or len(set(self.dims.values())) > 1):
            raise LayoutFormError(
                f"keys of {self.head_dim} and values of {self.dims['v']} elements a head: with a "
                f"scale for {BLOCK_DIM} both are equal, and a multiple of {BLOCK_DIM}"
            )

    @property
    def dims(self) -> dict[str, int]:
        """Elements of a head's key ``k`` and value ``v``."""
        return {"k": self.head_dim, "v": self.value_dim or self.head_dim}

    @property
    def packed(self) -> bool:
        """Whether a byte holds two elements."""
        return self.scales.kind is ScaleKind.PER_16

    def fields(self) -> tuple[Field, ...]:
        """Return ``k`` and ``v``, both ``[head, dim]`` per token; scales in the cache: ``[head]``.

        Float4 elements are ``[head, pair]``, with scales ``[head, block]``.
        """
        fields = []
        for part, dim in self.dims.items():
            name, axes, shape = f"layers.{self.layer}.{part}", ("head", "dim"), (self.kv_heads, dim)
            window, words = self.window_tokens, self.scales.words
            if self.packed:
                pairs, blocks = (self.kv_heads, dim // 2), (self.kv_heads, dim // BLOCK_DIM)
                data = Field(name, Kind.PER_TOKEN, ("head", "pair"), pairs, window, words)
                scale = f"{name}_scale", Kind.PER_TOKEN, ("head", "block"), blocks, window
                fields += [data, Field(*scale)]
                continue
            fields.append(Field(name, Kind.PER_TOKEN, axes, shape, window, words))
            if self.scales.per_token:
                heads = ("head",), (self.kv_heads,)
                fields.append(Field(f"{name}_scale", Kind.PER_TOKEN, *heads, window))
        return tuple(fields)


@dataclass(frozen=True, slots=True)
class MlaSpec(Worded):
    """Multi-head latent attention: one vector per token, which every rank holds.

    Vectors of layer number ``layer`` have elements of type ``dtype``, multiplied by ``scales``.
    ``latent_dim`` counts the compressed keys and values, and the rotary part behind them.
    """

    layer: int
    latent_dim: int
    dtype: DType
    scales: Scales = NO_SCALES

    def __post_init__(self) -> None:
        """Refuse scales of a type without scales, and scales that no engine keeps with latents."""
        Worded.__post_init__(self)
        self.scales.check(self.dtype)
        if self.scales.per_token or self.scales.kind is ScaleKind.PER_16:
            raise LayoutFormError(
                "latents (MLA) have no scales per token and head: no engine keeps them; give "
                "static scales or none"
            )
        if self.scales.kind is ScaleKind.PER_BLOCK:
            raise LayoutFormError(
                "latents (MLA) have scales per block only beside an indexer (DeepSeek sparse "
                "attention, vLLM fp8_ds_mla); give static scales or none"
            )

    def parts(self) -> tuple[tuple[Field, DType], ...]:
        """Return ``latent`` with its type."""
        name, shape = f"layers.{self.layer}.latent", (self.latent_dim,)
        field = Field(name, Kind.PER_TOKEN, ("dim",), shape, scales=self.scales.words)
        return ((field, self.dtype),)

    def fields(self) -> tuple[Field, ...]:
        """Return ``latent``."""
        return tuple(field for field, _ in self.parts())


@dataclass(frozen=True, slots=True)
class BlockScaledMlaSpec(Worded):
    """Latents in float8 with a scale for every block of elements, and a rotary part in bfloat16.

    vLLM `fp8_ds_mla`: 512 float8_e4m3, 4 float32, 64 bfloat16 in a row of 656 bytes
    (`v1/attention/backends/mla/flashmla_sparse.py`).
    """

    layer: int
    latent_dim: int = 512
    rope_dim: int = 64
    block_dim: int = 128
    rope_dtype: DType = DType.BFLOAT16

    def __post_init__(self) -> None:
        """Refuse a block that does not divide the latent."""
        Worded.__post_init__(self)
        if self.block_dim < 1 or self.latent_dim % self.block_dim:
            raise LayoutFormError(
                f"blocks of {self.block_dim} elements do not divide a latent of {self.latent_dim}"
            )

    def parts(self) -> tuple[tuple[Field, DType], ...]:
        """Return ``latent``, ``latent_scale`` and ``rope`` with their types, in row order."""
        prefix, words = f"layers.{self.layer}", f"per token and {self.block_dim} elements"
        blocks = (self.latent_dim // self.block_dim,)
        latent = Field(
            f"{prefix}.latent", Kind.PER_TOKEN, ("dim",), (self.latent_dim,), scales=words
        )
        scale = Field(f"{prefix}.latent_scale", Kind.PER_TOKEN, ("block",), blocks)
        rope = Field(f"{prefix}.rope", Kind.PER_TOKEN, ("dim",), (self.rope_dim,))
        return (latent, DType.FLOAT8_E4M3FN), (scale, SCALE_DTYPE), (rope, self.rope_dtype)

    def fields(self) -> tuple[Field, ...]:
        """Return ``latent``, ``latent_scale`` and ``rope``."""
        return tuple(field for field, _ in self.parts())


@dataclass(frozen=True, slots=True)
class IndexerSpec(Worded):
    """The keys of a sparse attention's indexer: one float8 vector per token, whole on every rank.

    Every ``block_dim`` elements have a scale. In a page the scales of all tokens lie behind the
    elements of all tokens, so it matters where a page ends: ``page_tokens`` is the only number of
    tokens that a page can have; 0 means any. (vLLM `DeepseekV32IndexerCache`; pages are the
    pages of its kernels, `DeepseekV32IndexerBackend.get_supported_kernel_block_sizes`.)
    """

    layer: int
    key_dim: int = 128
    block_dim: int = 128
    page_tokens: int = 0

    def __post_init__(self) -> None:
        """Refuse a block that does not divide the vector."""
        Worded.__post_init__(self)
        if self.block_dim < 1 or self.key_dim % self.block_dim:
            raise LayoutFormError(
                f"blocks of {self.block_dim} elements do not divide an indexer's key of "
                f"{self.key_dim}"
            )

    def parts(self) -> tuple[tuple[Field, DType], ...]:
        """Return ``index_k`` and ``index_k_scale`` with their types, in page order."""
        name, words = f"layers.{self.layer}.index_k", f"per token and {self.block_dim} elements"
        blocks = (self.key_dim // self.block_dim,)
        key = Field(name, Kind.PER_TOKEN, ("dim",), (self.key_dim,), scales=words)
        scale = Field(f"{name}_scale", Kind.PER_TOKEN, ("block",), blocks)
        return (key, DType.FLOAT8_E4M3FN), (scale, SCALE_DTYPE)

    def fields(self) -> tuple[Field, ...]:
        """Return ``index_k`` and ``index_k_scale``."""
        return tuple(field for field, _ in self.parts())


LatentSpec = MlaSpec | BlockScaledMlaSpec
LayerSpec = AttentionSpec | LatentSpec | IndexerSpec | RecurrentSpec


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model: its ``name`` and its ``layers`` with state.

    ``layer_count`` counts layers without state too, since pipeline stages are cut by it; 0 means
    that the last layer with state is the last layer. ``revision``, ``adapter`` and
    ``quantisation`` have the meaning of `ModelIdentity`. If a layer has several attentions, each
    has a number of its own, ``numbers_per_layer`` numbers per layer, and no stage separates them.
    ``draft_layers`` belong to the draft model named ``draft`` (see `Field`); their numbers follow
    all others, and the last stage runs them.
    """

    name: str
    layers: tuple[LayerSpec, ...]
    layer_count: int = 0
    revision: str = ""
    adapter: str = ""
    quantisation: str = ""
    numbers_per_layer: int = 1
    draft_layers: tuple[LayerSpec, ...] = ()
    draft: str = ""

    @property
    def depth(self) -> int:
        """Number of layers."""
        last = max((layer.layer for layer in self.layers), default=-1)
        return self.layer_count or 1 + last // self.numbers_per_layer

    @property
    def recurrent(self) -> bool:
        """Whether the model has recurrent state, so that the N-1 rule holds."""
        return any(isinstance(layer, RecurrentSpec) for layer in self.layers)

    @property
    def page_tokens(self) -> int:
        """The only number of tokens that a page can have; 0 means any."""
        indexers = (layer for layer in self.layers if isinstance(layer, IndexerSpec))
        return max((indexer.page_tokens for indexer in indexers), default=0)

    def model(self, with_inputs: bool = False) -> Model:
        """Return the model's fields, and on request the inputs of its recurrent layers."""
        fields = tuple(field for layer in self.layers for field in layer.fields())
        drafted = (field for layer in self.draft_layers for field in layer.fields())
        fields += tuple(replace(field, draft=self.draft) for field in drafted)
        recurrences = self._recurrences() if with_inputs else []
        inputs = tuple(
            field for number, recurrence in recurrences for field in recurrence.inputs(number)
        )
        identity = (self.revision, self.adapter, self.quantisation)
        return Model(self.name, fields, inputs, *identity)

    def check_rebuilding(self, wanted: bool) -> None:
        """Raise `LayoutFormError` if rebuilding is ``wanted`` and no conv window can be rebuilt."""
        recurrences = [recurrence for _, recurrence in self._recurrences()]
        if wanted and all(recurrence.obstacle for recurrence in recurrences):
            why = recurrences[0].obstacle if recurrences else "no layer is recurrent"
            raise LayoutFormError(f"model {self.name!r}: no conv state can be rebuilt: {why}")

    def check_drafts(self) -> None:
        """Raise `LayoutFormError` for draft layers without a name, or a name alone."""
        if bool(self.draft_layers) != bool(self.draft):
            raise LayoutFormError(
                f"model {self.name!r}: {len(self.draft_layers)} layers of a draft called "
                f"{self.draft!r}: layers need a name, and a name needs layers"
            )

    def _recurrences(self) -> list[tuple[int, Recurrence]]:
        return [
            (layer.layer, layer.recurrence())
            for layer in self.layers
            if isinstance(layer, RecurrentSpec)
        ]
