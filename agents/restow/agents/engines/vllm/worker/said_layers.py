"""`attention_layer`, `latent_layer` and `state_layer` make layers of what vLLM says of a cache.

They need no `config.json` and no family of the model: numbers of a rank, and how ranks part them.
What vLLM's words leave open is refused, naming it: `EngineUnsupportedError`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from restow.agents.engines.vllm.errors import EngineUnsupportedError
from restow.broker.families import (
    NO_SCALES,
    AttentionSpec,
    ConvLayout,
    GdnSpec,
    LinearAttentionSpec,
    Mamba1Spec,
    Mamba2Spec,
    MlaSpec,
    RecurrentSpec,
    Scales,
    ShortConvSpec,
)
from restow.broker.layout import DType
from restow.broker.words import Worded

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SaidHeads:
    """Holds how many KV heads vLLM gives a rank, of how many, over how many ranks."""

    rank: int
    model: int
    tp: int


@dataclass(frozen=True, slots=True)
class SaidStates(Worded):
    """Holds what vLLM says of a recurrent layer: its kind, and the states of TP 1 in their order.

    ``kind`` is the name of vLLM's `MambaAttentionBackendEnum`. Of a window's rows ``extra_rows``
    are for speculative tokens. ``replicated``: every rank has all of it.
    """

    kind: str
    shapes: tuple[Shape, ...]
    dtypes: tuple[DType, ...]
    conv_layout: ConvLayout
    extra_rows: int = 0
    replicated: bool = False

    def window(self) -> tuple[int, int]:
        """Return a window's taps and channels."""
        rows, channels = self.shapes[0]
        if self.conv_layout is ConvLayout.DS:
            rows, channels = channels, rows
        return rows - self.extra_rows, channels


def attention_layer(
    name: str,
    layer: int,
    heads: SaidHeads,
    head_dims: tuple[int, int],
    dtype: DType,
    window_tokens: int,
    scales: Scales = NO_SCALES,
) -> AttentionSpec:
    """Return a layer of keys and values; ``head_dims`` are those of a key and of a value.

    Raises `EngineUnsupportedError`.
    """
    if heads.rank != max(1, heads.model // heads.tp):
        raise unsaid(
            name,
            f"vLLM gives a rank of TP {heads.tp} {heads.rank} KV heads, and its model config says "
            f"{heads.model} in all: how ranks part them is missing",
        )
    if head_dims[0] != head_dims[1]:
        raise unsaid(
            name,
            f"keys of {head_dims[0]} and values of {head_dims[1]} elements a head: how both lie is "
            "missing",
        )
    return AttentionSpec(layer, heads.model, head_dims[0], dtype, window_tokens, scales)


def latent_layer(layer: int, latent_dim: int, dtype: DType, scales: Scales = NO_SCALES) -> MlaSpec:
    """Return a layer of latents, which every rank holds whole."""
    return MlaSpec(layer, latent_dim, dtype, scales)


def state_layer(name: str, layer: int, said: SaidStates) -> RecurrentSpec:
    """Return a layer of states. Raises `EngineUnsupportedError`."""
    count, make = _KINDS.get(said.kind, (0, _mamba1))
    if not count:
        known = ", ".join(_KINDS)
        raise unsaid(name, f"states of kind {said.kind} are not known; known are {known}")
    if len(said.shapes) != count or len(said.dtypes) != count:
        found = f"{len(said.shapes)} states {said.shapes}"
        raise unsaid(name, f"{found} in place of the {count} of kind {said.kind}")
    if said.replicated and said.kind != "SHORT_CONV":
        raise unsaid(name, f"states of kind {said.kind} that every rank has whole are not known")
    spec = make(layer, said)
    if spec is None:
        raise unsaid(name, f"states {said.shapes} are none of kind {said.kind}")
    return spec


def unsaid(name: str, what: str) -> EngineUnsupportedError:
    """Return what to raise about a layer of which vLLM says too little."""
    return EngineUnsupportedError(f"{name}: {what}", layer=name)


# -- inside ---------------------------------------------------------------------------------------


def _types(said: SaidStates) -> tuple[DType, DType]:
    conv, state = said.dtypes
    return conv, state


def _mamba1(layer: int, said: SaidStates) -> RecurrentSpec | None:
    window, (channels, state) = said.window(), said.shapes[1]
    taps, columns = window[0] + said.extra_rows, window[1]  # it has no rows for speculation
    if columns != channels:
        return None
    return Mamba1Spec(layer, channels, state, taps + 1, *_types(said))


def _mamba2(layer: int, said: SaidStates) -> RecurrentSpec | None:
    """x has a channel for each dim of a head; B and C have what is left over."""
    (taps, columns), (heads, head_dim, state) = said.window(), said.shapes[1]
    groups, rest = divmod(columns - heads * head_dim, 2 * state)
    if groups < 1 or rest:
        return None
    return Mamba2Spec(layer, heads, head_dim, state, groups, taps + 1, *_types(said))


def _gdn(layer: int, said: SaidStates) -> RecurrentSpec | None:
    """V has a channel for each row of a matrix; Q and K have what is left over.

    KDA says the same of itself, and has the same fields: there are as many keys as values.
    """
    (taps, columns), (heads, value_dim, key_dim) = said.window(), said.shapes[1]
    key_heads, rest = divmod(columns - heads * value_dim, 2 * key_dim)
    if key_heads < 1 or rest:
        return None
    return GdnSpec(layer, key_heads, heads, key_dim, value_dim, taps + 1, *_types(said))


def _short_conv(layer: int, said: SaidStates) -> RecurrentSpec | None:
    taps, channels = said.window()
    return ShortConvSpec(layer, channels, taps + 1, said.dtypes[0], said.replicated)


def _linear(layer: int, said: SaidStates) -> RecurrentSpec | None:
    heads, dim, key_dim = said.shapes[0]
    return LinearAttentionSpec(layer, heads, dim, said.dtypes[0]) if dim == key_dim else None


_KINDS: dict[str, tuple[int, Callable[[int, SaidStates], RecurrentSpec | None]]] = {
    "MAMBA1": (2, _mamba1),
    "MAMBA2": (2, _mamba2),
    "GDN_ATTN": (2, _gdn),
    "SHORT_CONV": (1, _short_conv),
    "LINEAR": (1, _linear),
}
"""How many states a kind has, and what makes a layer of them."""
