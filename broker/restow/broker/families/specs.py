"""What a model's state consists of, layer by layer, before any parallelism."""

from __future__ import annotations

from dataclasses import dataclass, replace

from restow.broker.errors import LayoutFormError
from restow.broker.families.parts import Recurrence
from restow.broker.families.recurrent import RecurrentSpec
from restow.broker.families.scales import (
    BLOCK_DIM,
    NO_SCALES,
    SCALE_DTYPE,
    ScaleKind,
    Scales,
)
from restow.broker.layout import DType, Field, Kind, Model
from restow.broker.words import Worded


@dataclass(frozen=True, slots=True)
class AttentionSpec(Worded):
    """Grouped-query attention: keys and values of ``kv_heads`` heads, one entry a token.

    With ``window_tokens`` the next token sees only so many before it (sliding window); 0: all.
    ``scales`` are for float8, int8 and float4 (of which pairs are counted). ``value_dim``
    is for values of another width than keys; 0: of the same.
    """

    layer: int
    kv_heads: int
    head_dim: int
    dtype: DType
    window_tokens: int = 0
    scales: Scales = NO_SCALES
    value_dim: int = 0

    def __post_init__(self) -> None:
        """Refuse scales of a type that has none."""
        Worded.__post_init__(self)
        self.scales.check(self.dtype)
        if self.scales.kind is ScaleKind.PER_BLOCK:
            raise LayoutFormError("keys and values of heads have no scales per block")
        if self.packed and (self.head_dim % BLOCK_DIM or len(set(self.dims.values())) > 1):
            raise LayoutFormError(
                f"keys of {self.head_dim} and values of {self.dims['v']} elements a head: with a "
                f"scale for {BLOCK_DIM} both are equal, and a multiple of that"
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
        """``k`` and ``v``, each ``[head, dim]`` a token; scales in the cache are ``[head]``.

        Where bytes hold two elements each they are ``[head, pair]``, with scales ``[head, block]``.
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
    """Multi-head latent attention: one vector a token, which every rank holds.

    ``latent_dim`` counts the compressed keys and values, and the rotary part behind them.
    """

    layer: int
    latent_dim: int
    dtype: DType
    scales: Scales = NO_SCALES

    def __post_init__(self) -> None:
        """Refuse scales of a type that has none, and those that no engine keeps with latents."""
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
        """``latent`` with its type."""
        name, shape = f"layers.{self.layer}.latent", (self.latent_dim,)
        field = Field(name, Kind.PER_TOKEN, ("dim",), shape, scales=self.scales.words)
        return ((field, self.dtype),)

    def fields(self) -> tuple[Field, ...]:
        """``latent``."""
        return tuple(field for field, _ in self.parts())


@dataclass(frozen=True, slots=True)
class BlockScaledMlaSpec(Worded):
    """Latents in float8 with a scale for every block of elements, the rotary part as it is.

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
        """``latent``, ``latent_scale`` and ``rope`` with their types, as they lie in a row."""
        prefix, words = f"layers.{self.layer}", f"per token and {self.block_dim} elements"
        blocks = (self.latent_dim // self.block_dim,)
        latent = Field(
            f"{prefix}.latent", Kind.PER_TOKEN, ("dim",), (self.latent_dim,), scales=words
        )
        scale = Field(f"{prefix}.latent_scale", Kind.PER_TOKEN, ("block",), blocks)
        rope = Field(f"{prefix}.rope", Kind.PER_TOKEN, ("dim",), (self.rope_dim,))
        return (latent, DType.FLOAT8_E4M3FN), (scale, SCALE_DTYPE), (rope, self.rope_dtype)

    def fields(self) -> tuple[Field, ...]:
        """``latent``, ``latent_scale`` and ``rope``."""
        return tuple(field for field, _ in self.parts())


@dataclass(frozen=True, slots=True)
class IndexerSpec(Worded):
    """The keys of a sparse attention's indexer: one vector a token in float8, whole on every rank.

    Every ``block_dim`` elements have a scale. In a page the scales of all tokens lie behind the
    elements of all tokens, so it matters where a page ends: ``page_tokens`` is the only number of
    tokens that the engine makes pages of; 0: any. (vLLM `DeepseekV32IndexerCache`; pages are those
    of its kernels, `DeepseekV32IndexerBackend.get_supported_kernel_block_sizes`.)
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
        """``index_k`` and ``index_k_scale`` with their types, one behind the other in a page."""
        name, words = f"layers.{self.layer}.index_k", f"per token and {self.block_dim} elements"
        blocks = (self.key_dim // self.block_dim,)
        key = Field(name, Kind.PER_TOKEN, ("dim",), (self.key_dim,), scales=words)
        scale = Field(f"{name}_scale", Kind.PER_TOKEN, ("block",), blocks)
        return (key, DType.FLOAT8_E4M3FN), (scale, SCALE_DTYPE)

    def fields(self) -> tuple[Field, ...]:
        """``index_k`` and ``index_k_scale``."""
        return tuple(field for field, _ in self.parts())


LatentSpec = MlaSpec | BlockScaledMlaSpec
LayerSpec = AttentionSpec | LatentSpec | IndexerSpec | RecurrentSpec


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model: its name and those of its layers that have state.

    ``layer_count`` counts the other layers too, which pipeline stages are cut by; 0: the last
    layer with state is the last of all. ``revision``, ``adapter`` and ``quantisation`` are as of
    `ModelIdentity`. Where layers have several attentions each, these are numbered on,
    ``numbers_per_layer`` in a layer: no stage parts them. ``draft_layers`` are those of the draft
    model that ``draft`` names (see `Field`), numbered behind all others; the last stage runs them.
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
        """How many layers it has."""
        last = max((layer.layer for layer in self.layers), default=-1)
        return self.layer_count or 1 + last // self.numbers_per_layer

    @property
    def recurrent(self) -> bool:
        """Whether it has recurrent state, so that the N-1 rule holds."""
        return any(isinstance(layer, RecurrentSpec) for layer in self.layers)

    @property
    def page_tokens(self) -> int:
        """The only number of tokens that pages can have; 0: any."""
        indexers = (layer for layer in self.layers if isinstance(layer, IndexerSpec))
        return max((one.page_tokens for one in indexers), default=0)

    def model(self, with_inputs: bool = False) -> Model:
        """The fields, in the order of the layers, and what recurrent layers read if asked for."""
        fields = tuple(f for layer in self.layers for f in layer.fields())
        drafted = (f for layer in self.draft_layers for f in layer.fields())
        fields += tuple(replace(f, draft=self.draft) for f in drafted)
        found = self._recurrences() if with_inputs else []
        inputs = tuple(f for n, one in found for f in one.inputs(n))
        identity = (self.revision, self.adapter, self.quantisation)
        return Model(self.name, fields, inputs, *identity)

    def check_rebuilding(self, wanted: bool) -> None:
        """Raise `LayoutFormError` if it is ``wanted`` and no conv window can be rebuilt."""
        found = [one for _, one in self._recurrences()]
        if wanted and all(one.obstacle for one in found):
            why = found[0].obstacle if found else "no layer is recurrent"
            raise LayoutFormError(f"model {self.name!r}: no conv state can be rebuilt: {why}")

    def check_drafts(self) -> None:
        """Raise `LayoutFormError` for layers of a draft without its name, or a name without any."""
        if bool(self.draft_layers) != bool(self.draft):
            raise LayoutFormError(
                f"model {self.name!r}: {len(self.draft_layers)} layers of a draft called "
                f"{self.draft!r}: layers need a name, and a name layers"
            )

    def _recurrences(self) -> list[tuple[int, Recurrence]]:
        return [
            (layer.layer, layer.recurrence())
            for layer in self.layers
            if isinstance(layer, RecurrentSpec)
        ]
