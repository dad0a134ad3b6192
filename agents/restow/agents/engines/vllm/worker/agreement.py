"""`check_agreement` compares what a model's config and vLLM's spec say of a layer.

`engine_model` and `joined_model` join what all ranks say, `group_windows` finds the windows of
groups.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from restow.agents.engines.vllm.errors import CacheUnknownError
from restow.broker.families import (
    AttentionSpec,
    LayerSpec,
    MlaSpec,
    ModelSpec,
    RecurrentSpec,
)
from restow.broker.layout import Layout


def check_agreement(name: str, known: LayerSpec, said: LayerSpec) -> None:
    """Raise `CacheUnknownError` with both numbers where config and spec differ in one."""
    ours, theirs = _numbers(known), _numbers(said)
    for what in (*ours, *theirs):
        if ours.get(what) != theirs.get(what):
            raise CacheUnknownError(
                f"{name}: the model's config says {what} {ours.get(what)}, vLLM's KV cache config "
                f"{theirs.get(what)}",
                layer=name,
            )


def engine_model(name: str, ranks: Iterable[Iterable[LayerSpec]]) -> ModelSpec:
    """Return the model whose layers the ranks hold, in the order in which families list them.

    Raises `CacheUnknownError` where ranks of one layer do not agree.
    """
    found: dict[tuple[int, bool], LayerSpec] = {}
    for layers in ranks:
        for spec in layers:
            key = spec.layer, isinstance(spec, RecurrentSpec)
            if found.setdefault(key, spec) != spec:
                raise CacheUnknownError(
                    f"layer {spec.layer}: ranks hold {found[key]} and {spec} of it",
                    layer=f"{spec.layer}",
                )
    return ModelSpec(name, tuple(found[key] for key in sorted(found)))


def joined_model(ranks: Sequence[ModelSpec]) -> ModelSpec:
    """Return the model that all ranks hold parts of, of which one may have layers of a draft.

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
    for group, some in sizes.items():
        if len(some) > 1:
            raise CacheUnknownError(
                f"{group} holds layers with windows of {sorted(some)} tokens", group=group
            )
    return {group: some.pop() for group, some in sizes.items()}


# -- inside ---------------------------------------------------------------------------------------


def _numbers(spec: LayerSpec) -> Mapping[str, object]:
    """Return what both can say of a layer, by its name in a message."""
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
