"""The recurrent families: what each keeps, before any tensor parallelism.

Shapes and orders are those of vLLM 0.32 (`mamba_utils.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from restow.broker.families.parts import Mixer, Recurrence, Sharing, StatePart
from restow.broker.layout import DType, Field
from restow.broker.words import Worded

_HEADS = ("head", "dim")
MATRICES = ("head", "dim", "key_dim")


@dataclass(frozen=True, slots=True)
class RecurrentSpec(Worded, ABC):
    """A layer with recurrent state: each family says what it keeps."""

    layer: int

    @abstractmethod
    def recurrence(self) -> Recurrence:
        """What the layer keeps, and how ranks part it."""

    def fields(self) -> tuple[Field, ...]:
        """Its conv windows and its states as fields of the model."""
        return self.recurrence().fields(self.layer)


@dataclass(frozen=True, slots=True)
class Mamba1Spec(RecurrentSpec):
    """A Mamba1 mixer (Mamba, Jamba): a window of ``channels``, and ``[channels, state]``."""

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
            (StatePart("conv.x", ("channel",), (size,), "Mamba channel", size),),
            self.conv_dtype,
            (StatePart("ssm", ("channel", "state"), (size, self.state), "Mamba channel", size),),
            self.ssm_dtype,
            speculates=False,
            mixer=self.mixer,
        )


@dataclass(frozen=True, slots=True)
class Mamba2Spec(RecurrentSpec):
    """A Mamba2 mixer: conv windows of x, B and C over ``conv_kernel - 1`` taps, and the SSM state.

    x has ``heads * head_dim`` channels, B and C have ``groups * state`` each; the SSM state is
    ``[heads, head_dim, state]``.
    """

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
        heads, unit = self.heads, "Mamba head"
        sizes = (heads, self.head_dim, self.state)
        shared = ("group", "state"), (self.groups, self.state), "group", self.groups, Sharing.SHARED
        return Recurrence(
            "mamba",
            self.conv_kernel - 1,
            (
                StatePart("conv.x", ("channel",), (heads * self.head_dim,), unit, heads),
                StatePart("conv.B", *shared),
                StatePart("conv.C", *shared),
            ),
            self.conv_dtype,
            (StatePart("ssm", ("head", "dim", "state"), sizes, unit, heads),),
            self.ssm_dtype,
            mixer=self.mixer,
        )


@dataclass(frozen=True, slots=True)
class GdnSpec(RecurrentSpec):
    """Gated delta net (Qwen3-Next): conv windows of Q, K and V, and one matrix a value head.

    The matrix is ``[value_dim, key_dim]``.
    """

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
        matrices = (*values, self.key_dim)
        return Recurrence(
            "gdn",
            self.conv_kernel - 1,
            (
                StatePart("conv.Q", _HEADS, keys, "key head", self.key_heads),
                StatePart("conv.K", _HEADS, keys, "key head", self.key_heads),
                StatePart("conv.V", _HEADS, values, "value head", self.value_heads),
            ),
            self.conv_dtype,
            (StatePart("state", MATRICES, matrices, "value head", self.value_heads),),
            self.state_dtype,
        )


@dataclass(frozen=True, slots=True)
class KdaSpec(RecurrentSpec):
    """Kimi delta attention (Kimi-Linear): as GDN, with square matrices."""

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
            tuple(StatePart(f"conv.{name}", _HEADS, shape, unit, self.heads) for name in "QKV"),
            self.conv_dtype,
            (StatePart("state", MATRICES, (*shape, self.dim), unit, self.heads),),
            self.state_dtype,
        )


@dataclass(frozen=True, slots=True)
class ShortConvSpec(RecurrentSpec):
    """A short convolution (LFM2): a window and nothing else.

    ``replicated``: every rank holds all channels.
    """

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
            (StatePart("conv.x", ("channel",), (channels,), "conv channel", channels, sharing),),
            self.conv_dtype,
            (),
            self.conv_dtype,
            speculates=False,
        )


@dataclass(frozen=True, slots=True)
class LinearAttentionSpec(RecurrentSpec):
    """Linear attention (MiniMax, Bailing): one square matrix a head, no window."""

    heads: int
    dim: int
    state_dtype: DType

    def recurrence(self) -> Recurrence:
        """One state."""
        shape = (self.heads, self.dim, self.dim)
        part = StatePart("state", MATRICES, shape, "linear attention head", self.heads)
        return Recurrence("linear", 0, (), self.state_dtype, (part,), self.state_dtype)
