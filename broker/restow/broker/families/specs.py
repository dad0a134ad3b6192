"""What a model's state consists of, layer by layer, before any parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from restow.broker.errors import LayoutFormError
from restow.broker.families.parts import Recurrence
from restow.broker.families.recurrent import RecurrentSpec
from restow.broker.layout import DType, Field, Kind, Model


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Grouped-query attention: keys and values of ``kv_heads`` heads, one entry a token.

    With ``window_tokens`` the next token sees only so many before it (sliding window); 0: all.
    """

    layer: int
    kv_heads: int
    head_dim: int
    dtype: DType
    window_tokens: int = 0

    def fields(self) -> tuple[Field, ...]:
        """``k`` and ``v``, each ``[head, dim]`` a token."""
        shape = (self.kv_heads, self.head_dim)
        return tuple(
            Field(
                f"layers.{self.layer}.{name}",
                Kind.PER_TOKEN,
                ("head", "dim"),
                shape,
                self.window_tokens,
            )
            for name in ("k", "v")
        )


@dataclass(frozen=True, slots=True)
class MlaSpec:
    """Multi-head latent attention: one vector a token, which every rank holds.

    ``latent_dim`` counts the compressed keys and values, and the rotary part behind them.
    """

    layer: int
    latent_dim: int
    dtype: DType

    def fields(self) -> tuple[Field, ...]:
        """``latent``."""
        name = f"layers.{self.layer}.latent"
        return (Field(name, Kind.PER_TOKEN, ("dim",), (self.latent_dim,)),)


LayerSpec = AttentionSpec | MlaSpec | RecurrentSpec


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model: its name and those of its layers that have state.

    ``layer_count`` counts the other layers too, which pipeline stages are cut by; 0: the last
    layer with state is the last of all.
    """

    name: str
    layers: tuple[LayerSpec, ...]
    layer_count: int = 0

    @property
    def depth(self) -> int:
        """How many layers it has."""
        return self.layer_count or 1 + max((layer.layer for layer in self.layers), default=-1)

    @property
    def recurrent(self) -> bool:
        """Whether it has recurrent state, so that the N-1 rule holds."""
        return any(not isinstance(layer, AttentionSpec | MlaSpec) for layer in self.layers)

    def model(self, with_inputs: bool = False) -> Model:
        """The fields, in the order of the layers, and what recurrent layers read if asked for."""
        fields = tuple(f for layer in self.layers for f in layer.fields())
        found = self._recurrences() if with_inputs else []
        return Model(self.name, fields, tuple(f for n, one in found for f in one.inputs(n)))

    def check_rebuilding(self, wanted: bool) -> None:
        """Raise `LayoutFormError` if it is ``wanted`` and no conv window can be rebuilt."""
        found = [one for _, one in self._recurrences()]
        if wanted and all(one.obstacle for one in found):
            why = found[0].obstacle if found else "no layer is recurrent"
            raise LayoutFormError(f"model {self.name!r}: no conv state can be rebuilt: {why}")

    def _recurrences(self) -> list[tuple[int, Recurrence]]:
        return [
            (layer.layer, layer.recurrence())
            for layer in self.layers
            if not isinstance(layer, AttentionSpec | MlaSpec)
        ]
