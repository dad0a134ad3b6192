"""What a model's state consists of, layer by layer, before any tensor parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from restow.broker.layout import DType, Field, Kind, Model


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Grouped-query attention: keys and values of ``kv_heads`` heads, one entry a token."""

    layer: int
    kv_heads: int
    head_dim: int
    dtype: DType

    def fields(self) -> tuple[Field, ...]:
        """``k`` and ``v``, each ``[head, dim]`` a token."""
        shape = (self.kv_heads, self.head_dim)
        return tuple(
            Field(f"layers.{self.layer}.{name}", Kind.PER_TOKEN, ("head", "dim"), shape)
            for name in ("k", "v")
        )


@dataclass(frozen=True, slots=True)
class Mamba2Spec:
    """A Mamba2 mixer: conv windows of x, B and C over ``conv_kernel - 1`` taps, and the SSM state.

    x has ``heads * head_dim`` channels, B and C have ``groups * state`` each; the SSM state is
    ``[heads, head_dim, state]`` (vLLM `mamba_utils.py`, Mamba2).
    """

    layer: int
    heads: int
    head_dim: int
    state: int
    groups: int
    conv_kernel: int
    conv_dtype: DType
    ssm_dtype: DType

    @property
    def taps(self) -> int:
        """Live rows of the conv state: ``conv_kernel - 1``."""
        return self.conv_kernel - 1

    @property
    def channels(self) -> int:
        """Channels of x."""
        return self.heads * self.head_dim

    def fields(self) -> tuple[Field, ...]:
        """``conv.x``, ``conv.B``, ``conv.C`` and ``ssm``."""
        prefix = f"layers.{self.layer}"
        bc_axes, bc_shape = ("group", "state", "tap"), (self.groups, self.state, self.taps)
        return (
            Field(
                f"{prefix}.conv.x", Kind.SNAPSHOT, ("channel", "tap"), (self.channels, self.taps)
            ),
            Field(f"{prefix}.conv.B", Kind.SNAPSHOT, bc_axes, bc_shape),
            Field(f"{prefix}.conv.C", Kind.SNAPSHOT, bc_axes, bc_shape),
            Field(
                f"{prefix}.ssm",
                Kind.SNAPSHOT,
                ("head", "dim", "state"),
                (self.heads, self.head_dim, self.state),
            ),
        )


LayerSpec = AttentionSpec | Mamba2Spec


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model: its name and those of its layers that have state."""

    name: str
    layers: tuple[LayerSpec, ...]

    @property
    def recurrent(self) -> bool:
        """Whether it has recurrent state, so that the N-1 rule holds."""
        return any(isinstance(layer, Mamba2Spec) for layer in self.layers)

    def model(self) -> Model:
        """The fields, in the order of the layers."""
        return Model(self.name, tuple(f for layer in self.layers for f in layer.fields()))
