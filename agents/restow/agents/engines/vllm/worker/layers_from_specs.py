"""Make the layers of a model from vLLM's specs of its caches, and join those of all ranks.

`attention_layer`, `latent_layer` and `state_layer` need no `config.json` and no family: they take
the numbers of a rank, and how ranks divide them. They raise `EngineUnsupportedError` that names
whatever the numbers leave open. `check_agreement` compares such a layer with the config's,
`engine_model` and `joined_model` join the layers of ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from restow.agents.engines.common.adapter_errors import CacheUnknownError, EngineUnsupportedError
from restow.broker.families import (
    NO_SCALES,
    AttentionSpec,
    ConvLayout,
    GdnSpec,
    IndexerSpec,
    LayerSpec,
    LinearAttentionSpec,
    Mamba1Spec,
    Mamba2Spec,
    MlaSpec,
    ModelSpec,
    RecurrentSpec,
    Scales,
    ShortConvSpec,
)
from restow.broker.layout import DType, Layout
from restow.broker.words import Worded

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankHeads:
    """KV heads of a rank and of the whole model, and the number of ranks."""

    rank: int
    model: int
    tp: int


@dataclass(frozen=True, slots=True)
class StateShapes(Worded):
    """vLLM's spec of a recurrent layer: its kind, and its states at TP 1 in their order.

    ``kind`` is a name of vLLM's `MambaAttentionBackendEnum`. ``extra_rows`` of a window are for
    speculative tokens. ``replicated``: every rank has the whole state.
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
    heads: RankHeads,
    head_dims: tuple[int, int],
    dtype: DType,
    window_tokens: int,
    scales: Scales = NO_SCALES,
) -> AttentionSpec:
    """Return a layer of keys and values; ``head_dims`` are the sizes of a key and of a value.

    Raises `EngineUnsupportedError`.
    """
    if heads.rank != max(1, heads.model // heads.tp):
        raise unsupported_layer(
            name,
            f"vLLM gives a rank of TP {heads.tp} {heads.rank} KV heads, and its model config has "
            f"{heads.model} in all: how ranks divide them is missing",
        )
    if head_dims[0] != head_dims[1]:
        raise unsupported_layer(
            name,
            f"keys of {head_dims[0]} and values of {head_dims[1]} elements a head: how they lie "
            "is missing",
        )
    return AttentionSpec(layer, heads.model, head_dims[0], dtype, window_tokens, scales)


def latent_layer(layer: int, latent_dim: int, dtype: DType, scales: Scales = NO_SCALES) -> MlaSpec:
    """Return a layer of latents. Every rank holds all of it."""
    return MlaSpec(layer, latent_dim, dtype, scales)


def state_layer(name: str, layer: int, states: StateShapes) -> RecurrentSpec:
    """Return a layer of states. Raises `EngineUnsupportedError`."""
    count, make = _KINDS.get(states.kind, (0, _mamba1))
    if not count:
        known = ", ".join(_KINDS)
        raise unsupported_layer(
            name, f"states of kind {states.kind} are not known; known are {known}"
        )
    if len(states.shapes) != count or len(states.dtypes) != count:
        shapes = f"{len(states.shapes)} states {states.shapes}"
        raise unsupported_layer(name, f"{shapes} in place of the {count} of kind {states.kind}")
    if states.replicated and states.kind != "SHORT_CONV":
        raise unsupported_layer(
            name, f"states of kind {states.kind} that every rank has whole are not known"
        )
    spec = make(layer, states)
    if spec is None:
        raise unsupported_layer(name, f"states {states.shapes} are none of kind {states.kind}")
    return spec


def unsupported_layer(name: str, what: str) -> EngineUnsupportedError:
    """Return the error to raise about a layer that vLLM's specs do not determine."""
    return EngineUnsupportedError(f"{name}: {what}", layer=name)


# -- inside ---------------------------------------------------------------------------------------


def _types(states: StateShapes) -> tuple[DType, DType]:
    conv, state = states.dtypes
    return conv, state


def _mamba1(layer: int, states: StateShapes) -> RecurrentSpec | None:
    window, (channels, state) = states.window(), states.shapes[1]
    taps, columns = window[0] + states.extra_rows, window[1]  # Mamba1 has no rows for speculation
    if columns != channels:
        return None
    return Mamba1Spec(layer, channels, state, taps + 1, *_types(states))


def _mamba2(layer: int, states: StateShapes) -> RecurrentSpec | None:
    """Make a Mamba2 layer: x has a channel for each dim of a head, B and C share the others."""
    (taps, columns), (heads, head_dim, state) = states.window(), states.shapes[1]
    groups, rest = divmod(columns - heads * head_dim, 2 * state)
    if groups < 1 or rest:
        return None
    return Mamba2Spec(layer, heads, head_dim, state, groups, taps + 1, *_types(states))


def _gdn(layer: int, states: StateShapes) -> RecurrentSpec | None:
    """Make a delta-net layer: V has a channel for each row of a matrix, Q and K share the others.

    KDA has the same spec and the same fields, with as many keys as values.
    """
    (taps, columns), (heads, value_dim, key_dim) = states.window(), states.shapes[1]
    key_heads, rest = divmod(columns - heads * value_dim, 2 * key_dim)
    if key_heads < 1 or rest:
        return None
    return GdnSpec(layer, key_heads, heads, key_dim, value_dim, taps + 1, *_types(states))


def _short_conv(layer: int, states: StateShapes) -> RecurrentSpec | None:
    taps, channels = states.window()
    return ShortConvSpec(layer, channels, taps + 1, states.dtypes[0], states.replicated)


def _linear(layer: int, states: StateShapes) -> RecurrentSpec | None:
    heads, dim, key_dim = states.shapes[0]
    return LinearAttentionSpec(layer, heads, dim, states.dtypes[0]) if dim == key_dim else None


_KINDS: dict[str, tuple[int, Callable[[int, StateShapes], RecurrentSpec | None]]] = {
    "MAMBA1": (2, _mamba1),
    "MAMBA2": (2, _mamba2),
    "GDN_ATTN": (2, _gdn),
    "SHORT_CONV": (1, _short_conv),
    "LINEAR": (1, _linear),
}
"""By kind: the number of its states, and the function that makes a layer of them."""


def check_agreement(name: str, known: LayerSpec, found: LayerSpec) -> None:
    """Compare the config's layer with vLLM's. Raises `CacheUnknownError` where they differ."""
    ours, theirs = _numbers(known), _numbers(found)
    for what in (*ours, *theirs):
        if ours.get(what) != theirs.get(what):
            raise CacheUnknownError(
                f"{name}: the model's config says {what} {ours.get(what)}, vLLM's KV cache config "
                f"{theirs.get(what)}",
                layer=name,
            )


def engine_model(name: str, ranks: Iterable[Iterable[LayerSpec]]) -> ModelSpec:
    """Return the model whose layers the ranks hold, in the order that families use.

    Raises `CacheUnknownError` where ranks of one layer do not agree.
    """
    by_key: dict[tuple[int, bool, bool], LayerSpec] = {}
    for layers in ranks:
        for spec in layers:
            key = spec.layer, isinstance(spec, RecurrentSpec), isinstance(spec, IndexerSpec)
            if by_key.setdefault(key, spec) != spec:
                raise CacheUnknownError(
                    f"layer {spec.layer}: ranks hold {by_key[key]} and {spec} of it",
                    layer=f"{spec.layer}",
                )
    return ModelSpec(name, tuple(by_key[key] for key in sorted(by_key)))


def joined_model(ranks: Sequence[ModelSpec]) -> ModelSpec:
    """Return the model of which all ranks hold parts; some ranks may have layers of a draft.

    Raises `CacheUnknownError` where ranks do not agree.
    """
    name, drafts = ranks[0].name, {rank.draft for rank in ranks if rank.draft}
    if len(drafts) > 1:
        raise CacheUnknownError(f"ranks have several drafts: {sorted(drafts)}")
    return replace(
        engine_model(name, (rank.layers for rank in ranks)),
        draft_layers=engine_model(name, (rank.draft_layers for rank in ranks)).layers,
        draft=next(iter(drafts), ""),
    )


def group_windows(layout: Layout) -> dict[str, int]:
    """Return the window of each group's layers, 0 where they keep all tokens.

    Raises `CacheUnknownError` for a group whose layers have several.
    """
    windows = {field.name: field.window_tokens for field in layout.model.fields}
    sizes: defaultdict[str, set[int]] = defaultdict(set)
    for rank in layout.ranks:
        groups = {region.name: region.group for region in rank.regions}
        for shard in rank.shards:
            sizes[groups[shard.region]].add(windows.get(shard.field, 0))
    for group, windows_of_group in sizes.items():
        if len(windows_of_group) > 1:
            raise CacheUnknownError(
                f"{group} holds layers with windows of {sorted(windows_of_group)} tokens",
                group=group,
            )
    return {group: windows_of_group.pop() for group, windows_of_group in sizes.items()}


# -- inside ---------------------------------------------------------------------------------------


def _numbers(spec: LayerSpec) -> Mapping[str, object]:
    """Return the numbers of a layer that config and spec both have, by their names in a message."""
    if isinstance(spec, AttentionSpec):
        return {
            "KV heads": spec.kv_heads,
            "a head of": spec.head_dim,
            "a window of": spec.window_tokens,
            "KV of type": spec.dtype.label,
        }
    if isinstance(spec, MlaSpec):
        return {"a latent of": spec.latent_dim, "latents of type": spec.dtype.label}
    if not isinstance(spec, RecurrentSpec):
        return {"latents": type(spec).__name__}
    form = spec.recurrence()
    parts = {
        part.name: f"{list(part.shape)} of {part.units} ({part.sharing})"
        for part in (*form.conv, *form.states)
    }
    types = {"windows of type": form.conv_dtype.label} if form.conv else {}
    if form.states:
        types["states of type"] = form.state_dtype.label
    return {"taps": form.taps, **parts, **types}
