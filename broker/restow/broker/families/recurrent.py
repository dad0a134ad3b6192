"""Recurrent layers: the parts of each family's state, and which part of it a rank holds.

Shapes and orders are the same as in vLLM 0.32 (`mamba_utils.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum

from restow.broker.families.settings import rank_slice, rank_span
from restow.broker.layout import Box, DType, Field, Kind, Span
from restow.broker.words import Worded


def input_name(layer: int) -> str:
    """Return the name of a layer's kept inputs."""
    return f"layers.{layer}.mixer_input"


class Sharing(StrEnum):
    """How tensor-parallel ranks divide a part."""

    CUT = "cut"
    """Each rank has its slice."""
    SHARED = "shared"
    """The same as CUT, but if there are more ranks than units, ranks share a unit."""
    WHOLE = "whole"
    """Every rank holds all of it (vLLM `tp_replicated`)."""


@dataclass(frozen=True, slots=True)
class StatePart:
    """One field of a layer: ``shape`` over ``axes``; the first axis is cut.

    The first axis consists of ``units`` equal pieces, called ``unit`` (a head, a group); no rank
    holds a fraction of a piece.
    """

    name: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    unit: str
    units: int
    sharing: Sharing = Sharing.CUT

    def box(self, tp: int, rank: int) -> Box:
        """Return the box that ``rank`` of ``tp`` holds. Raises `TpSizeError`."""
        return (self._span(tp, rank), *(Span(0, size) for size in self.shape[1:]))

    def _span(self, tp: int, rank: int) -> Span:
        if self.sharing is Sharing.WHOLE:
            return Span(0, self.shape[0])
        choose = rank_slice if self.sharing is Sharing.CUT else rank_span
        units = choose(self.units, tp, rank, self.unit)
        size = self.shape[0] // self.units
        return Span(units.start * size, units.stop * size)


@dataclass(frozen=True, slots=True)
class Mixer(Worded):
    """The input of a recurrent layer, from whose in-projection its conv windows can be rebuilt.

    Inputs are vectors of ``hidden`` elements; the product is computed in ``dtype``. ``obstacle``
    says why a window is not that product alone; it is empty if the window is.
    """

    hidden: int
    dtype: DType
    obstacle: str = ""


@dataclass(frozen=True, slots=True)
class Recurrence:
    """The state of a recurrent layer: conv windows of ``taps`` rows, then recurrent states.

    ``kind`` names the region. Rows for speculative tokens follow the windows if the family
    ``speculates`` (vLLM `mamba_utils.py`).
    """

    kind: str
    taps: int
    conv: tuple[StatePart, ...]
    conv_dtype: DType
    states: tuple[StatePart, ...]
    state_dtype: DType
    speculates: bool = True
    mixer: Mixer | None = None

    @property
    def obstacle(self) -> str:
        """Why the windows can't be rebuilt from the layer's inputs; empty if they can."""
        if not self.conv:
            return "it has no conv windows"
        if self.mixer is None:
            return f"the in-projection of {self.kind} layers is not described"
        if not self.conv_dtype.castable or not self.mixer.dtype.castable:
            return f"{self.mixer.dtype.label} can't be multiplied into {self.conv_dtype.label}"
        return self.mixer.obstacle

    @property
    def read(self) -> Mixer | None:
        """The inputs from which the windows can be rebuilt; None if they can't."""
        return None if self.obstacle else self.mixer

    def inputs(self, layer: int) -> tuple[Field, ...]:
        """Return the layer's last inputs as fields, if its windows can be rebuilt from them."""
        if self.read is None:
            return ()
        shape = (self.taps, self.read.hidden)
        return (Field(input_name(layer), Kind.SNAPSHOT, ("tap", "hidden"), shape),)

    def fields(self, layer: int) -> tuple[Field, ...]:
        """Return every part as a field of the model; windows have an axis ``tap``."""
        windows = [(part, ("tap",), (self.taps,)) for part in self.conv]
        states = [(part, (), ()) for part in self.states]
        return tuple(
            Field(
                f"layers.{layer}.{part.name}",
                Kind.SNAPSHOT,
                (*part.axes, *axis),
                (*part.shape, *size),
            )
            for part, axis, size in (*windows, *states)
        )


_HEADS = ("head", "dim")
MATRICES = ("head", "dim", "key_dim")


@dataclass(frozen=True, slots=True)
class RecurrentSpec(Worded, ABC):
    """A layer with recurrent state."""

    layer: int

    @abstractmethod
    def recurrence(self) -> Recurrence:
        """Return the layer's state, and how ranks divide it."""

    def fields(self) -> tuple[Field, ...]:
        """Return conv windows and states as fields of the model."""
        return self.recurrence().fields(self.layer)


@dataclass(frozen=True, slots=True)
class Mamba1Spec(RecurrentSpec):
    """A Mamba1 mixer (Mamba, Jamba): a window of ``channels``, and ``[channels, state]``.

    ``state`` elements belong to a channel of layer number ``layer``. The window has one tap less
    than ``conv_kernel``, of type ``conv_dtype``; the other state is of type ``ssm_dtype``.
    ``mixer`` says how windows can be recomputed; None: they cannot.
    """

    channels: int
    state: int
    conv_kernel: int
    conv_dtype: DType
    ssm_dtype: DType
    mixer: Mixer | None = None

    def recurrence(self) -> Recurrence:
        """Return window and state, cut by channels, without rows for speculative tokens."""
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

    x has ``heads`` times ``head_dim`` channels, B and C have ``groups`` times ``state`` channels
    each; the SSM state is ``[heads, head_dim, state]``. The other arguments are those of
    `Mamba1Spec`: ``layer``, ``conv_kernel``, ``conv_dtype``, ``ssm_dtype`` and ``mixer``.
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
        """Return windows and state, cut by heads; if ranks outnumber groups, they share groups."""
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
    """Gated delta net (Qwen3-Next): conv windows of Q, K and V, and one matrix per value head.

    Layer number ``layer`` has ``key_heads`` of ``key_dim`` elements and ``value_heads`` of
    ``value_dim``. The matrix is ``[value_dim, key_dim]`` of type ``state_dtype``; a window has
    one tap less than ``conv_kernel``, of type ``conv_dtype``.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    conv_dtype: DType
    state_dtype: DType

    def recurrence(self) -> Recurrence:
        """Return windows and matrices; ranks cut key heads and value heads, and share neither."""
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
    """Kimi delta attention (Kimi-Linear): like GDN, with square matrices.

    Layer number ``layer`` has ``heads`` heads of ``dim`` elements; ``conv_kernel``, ``conv_dtype``
    and ``state_dtype`` are those of `GdnSpec`.
    """

    heads: int
    dim: int
    conv_kernel: int
    conv_dtype: DType
    state_dtype: DType

    def recurrence(self) -> Recurrence:
        """Return windows and matrices, cut by heads."""
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
    """A short convolution (LFM2): a conv window and no other state.

    Layer number ``layer`` keeps one tap less than ``conv_kernel`` of ``channels`` channels, of type
    ``conv_dtype``. If ``replicated``, every rank holds all channels.
    """

    channels: int
    conv_kernel: int
    conv_dtype: DType
    replicated: bool = False

    def recurrence(self) -> Recurrence:
        """Return the window, without rows for speculative tokens."""
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
    """Linear attention (MiniMax, Bailing): one square matrix per head, no window.

    Layer number ``layer`` has ``heads`` matrices of ``dim`` by ``dim``, of type ``state_dtype``.
    """

    heads: int
    dim: int
    state_dtype: DType

    def recurrence(self) -> Recurrence:
        """Return the matrices, cut by heads."""
        shape = (self.heads, self.dim, self.dim)
        part = StatePart("state", MATRICES, shape, "linear attention head", self.heads)
        return Recurrence("linear", 0, (), self.state_dtype, (part,), self.state_dtype)
