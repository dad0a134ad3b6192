"""The recurrent families: what each keeps, before any tensor parallelism.

Shapes and orders are those of vLLM 0.32 (`mamba_utils.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from restow.broker.families.parts import Mixer, Part, Recurrence, Sharing
from restow.broker.layout import DType, Field
from restow.broker.words import Worded


@dataclass(frozen=True, slots=True)
class Mamba1Spec(Worded):
    """A Mamba1 mixer (Mamba, Jamba): a window of ``channels``, and ``[channels, state]``."""

    layer: int
    channels: int
    state: int
    conv_kernel: int
    conv_dtype: DType
    ssm_dtype: DType
    mixer: Mixer | None = None

    def recurrence(self) -> Recurrence:
        """Any channel may be cut from its neighbours; no rows for speculative tokens."""
        size = self.channels
        return Recurrence(
            "mamba",
            self.conv_kernel - 1,
            (Part("conv.x", ("channel",), (size,), "Mamba channel", size),),
            self.conv_dtype,
            (Part("ssm", ("channel", "state"), (size, self.state), "Mamba channel", size),),
            self.ssm_dtype,
            speculates=False,
            mixer=self.mixer,
        )

    def fields(self) -> tuple[Field, ...]:
        """``conv.x`` and ``ssm``."""
        return self.recurrence().fields(self.layer)


@dataclass(frozen=True, slots=True)
class Mamba2Spec(Worded):
    """A Mamba2 mixer: conv windows of x, B and C over ``conv_kernel - 1`` taps, and the SSM state.

    x has ``heads * head_dim`` channels, B and C have ``groups * state`` each; the SSM state is
    ``[heads, head_dim, state]``.
    """

    layer: int
    heads: int
    head_dim: int
    state: int
    groups: int
    conv_kernel: int
    conv_dtype: DType
    ssm_dtype: DType
    mixer: Mixer | None = None

    def recurrence(self) -> Recurrence:
        """Ranks share groups when they are more."""
        heads, channels = self.heads, self.heads * self.head_dim
        shape = (self.groups, self.state)
        return Recurrence(
            "mamba",
            self.conv_kernel - 1,
            (
                Part("conv.x", ("channel",), (channels,), "Mamba head", heads),
                *(
                    Part(f"conv.{n}", ("group", "state"), shape, "group", self.groups, _SHARED)
                    for n in ("B", "C")
                ),
            ),
            self.conv_dtype,
            (
                Part(
                    "ssm",
                    ("head", "dim", "state"),
                    (heads, self.head_dim, self.state),
                    "Mamba head",
                    heads,
                ),
            ),
            self.ssm_dtype,
            mixer=self.mixer,
        )

    def fields(self) -> tuple[Field, ...]:
        """``conv.x``, ``conv.B``, ``conv.C`` and ``ssm``."""
        return self.recurrence().fields(self.layer)


@dataclass(frozen=True, slots=True)
class GdnSpec(Worded):
    """Gated delta net (Qwen3-Next): conv windows of Q, K and V, and one matrix a value head.

    The matrix is ``[value_dim, key_dim]``.
    """

    layer: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    conv_dtype: DType
    state_dtype: DType

    def recurrence(self) -> Recurrence:
        """Key heads and value heads are cut alike: neither is ever shared."""
        keys, values = (self.key_heads, self.key_dim), (self.value_heads, self.value_dim)
        return Recurrence(
            "gdn",
            self.conv_kernel - 1,
            (
                Part("conv.Q", _HEADS, keys, "key head", self.key_heads),
                Part("conv.K", _HEADS, keys, "key head", self.key_heads),
                Part("conv.V", _HEADS, values, "value head", self.value_heads),
            ),
            self.conv_dtype,
            (
                Part(
                    "state",
                    ("head", "dim", "key_dim"),
                    (*values, self.key_dim),
                    "value head",
                    self.value_heads,
                ),
            ),
            self.state_dtype,
        )

    def fields(self) -> tuple[Field, ...]:
        """``conv.Q``, ``conv.K``, ``conv.V`` and ``state``."""
        return self.recurrence().fields(self.layer)


@dataclass(frozen=True, slots=True)
class KdaSpec(Worded):
    """Kimi delta attention (Kimi-Linear): as GDN, with square matrices."""

    layer: int
    heads: int
    dim: int
    conv_kernel: int
    conv_dtype: DType
    state_dtype: DType

    def recurrence(self) -> Recurrence:
        """All heads are cut alike."""
        shape, unit = (self.heads, self.dim), "KDA head"
        return Recurrence(
            "kda",
            self.conv_kernel - 1,
            tuple(Part(f"conv.{name}", _HEADS, shape, unit, self.heads) for name in "QKV"),
            self.conv_dtype,
            (Part("state", ("head", "dim", "key_dim"), (*shape, self.dim), unit, self.heads),),
            self.state_dtype,
        )

    def fields(self) -> tuple[Field, ...]:
        """``conv.Q``, ``conv.K``, ``conv.V`` and ``state``."""
        return self.recurrence().fields(self.layer)


@dataclass(frozen=True, slots=True)
class ShortConvSpec(Worded):
    """A short convolution (LFM2): a window and nothing else.

    ``replicated``: every rank holds all channels.
    """

    layer: int
    channels: int
    conv_kernel: int
    conv_dtype: DType
    replicated: bool = False

    def recurrence(self) -> Recurrence:
        """One window; no rows for speculative tokens."""
        sharing = Sharing.WHOLE if self.replicated else Sharing.CUT
        channels = self.channels
        return Recurrence(
            "conv",
            self.conv_kernel - 1,
            (Part("conv.x", ("channel",), (channels,), "conv channel", channels, sharing),),
            self.conv_dtype,
            (),
            self.conv_dtype,
            speculates=False,
        )

    def fields(self) -> tuple[Field, ...]:
        """``conv.x``."""
        return self.recurrence().fields(self.layer)


@dataclass(frozen=True, slots=True)
class LinearAttentionSpec(Worded):
    """Linear attention (MiniMax, Bailing): one square matrix a head, no window."""

    layer: int
    heads: int
    dim: int
    state_dtype: DType

    def recurrence(self) -> Recurrence:
        """One state."""
        shape = (self.heads, self.dim, self.dim)
        part = Part("state", ("head", "dim", "key_dim"), shape, "linear attention head", self.heads)
        return Recurrence("linear", 0, (), self.state_dtype, (part,), self.state_dtype)

    def fields(self) -> tuple[Field, ...]:
        """``state``."""
        return self.recurrence().fields(self.layer)


RecurrentSpec = Mamba1Spec | Mamba2Spec | GdnSpec | KdaSpec | ShortConvSpec | LinearAttentionSpec

_SHARED = Sharing.SHARED
_HEADS = ("head", "dim")
