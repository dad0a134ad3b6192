"""`rank_model` makes a model of what vLLM's own specs and model config say of a rank's caches.

So an engine is served whose ``model_type`` no family knows; of others it is a check.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.model_executor.models.registry import ModelRegistry
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    SparseCacheRole,
)

from restow.agents.engines.vllm.errors import EngineUnsupportedError
from restow.agents.engines.vllm.model_revision import draft_name
from restow.agents.engines.vllm.worker.agreement import check_agreement, engine_model
from restow.agents.engines.vllm.worker.caches import FoundCache
from restow.agents.engines.vllm.worker.kv_scales import kv_type
from restow.agents.engines.vllm.worker.rank_layout import LayerCache, dtype_of, layer_of
from restow.agents.engines.vllm.worker.said_layers import (
    SaidHeads,
    SaidStates,
    attention_layer,
    latent_layer,
    state_layer,
    unsaid,
)
from restow.broker.families import AttentionSpec, ConvLayout, LayerSpec, MlaSpec, ModelSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig

Shapes = tuple[tuple[int, ...], ...]


def rank_model(
    name: str,
    known: ModelSpec | None,
    found: Iterable[FoundCache],
    config: VllmConfig,
    conv_layout: ConvLayout,
) -> ModelSpec:
    """Return the model that the rank's caches are of: what ``known`` says, if vLLM says no other.

    Layers of a draft, which no config of the model says, are those of vLLM in either case; types
    and scales are those of the caches. Raises `CacheUnknownError` with both numbers where the two
    differ; of a model that is not known `EngineUnsupportedError` that names what vLLM leaves open.
    """
    said, found = _SaidCaches(config, conv_layout), list(found)
    own = [one for one in found if not one.drafted]
    drafts = engine_model(name, [_distinct((one for one in found if one.drafted), said)]).layers
    if drafts:
        model = rank_model(name, known, own, config, conv_layout)
        return replace(model, draft_layers=drafts, draft=draft_name(config))
    if known is None:
        return engine_model(name, [_distinct(own, said)])
    layers = []
    for one in own:
        spec = _typed(layer_of(known, one.cache), one)
        layers.append(spec)
        try:
            layer = said.layer(one)
        except EngineUnsupportedError:  # the family says it
            continue
        check_agreement(one.cache.name, spec, layer)
    return engine_model(name, [layers])


# -- inside ---------------------------------------------------------------------------------------


def _typed(spec: LayerSpec, found: FoundCache) -> LayerSpec:
    """Return the layer in the cache's type, with its scales. Raises `EngineUnsupportedError`."""
    if not isinstance(spec, AttentionSpec | MlaSpec):
        return spec
    dtype, scales = kv_type(found.cache.name, found.spec, found.module)
    return replace(spec, dtype=dtype, scales=scales)


def _distinct(found: Iterable[FoundCache], said: _SaidCaches) -> Iterator[LayerSpec]:
    """Yield the layers of all caches. Refuses two of one kind that have one number."""
    names: dict[tuple[int, bool], str] = {}
    for one in found:
        name = one.cache.name
        other = names.setdefault((one.cache.layer, one.cache.is_state), name)
        if other != name:
            raise unsaid(
                name, f"{other} is layer {one.cache.layer}, too: which is which is missing"
            )
        yield said.layer(one)


class _SaidCaches:
    """Makes a layer of each cache, by vLLM's words alone."""

    def __init__(self, config: VllmConfig, conv_layout: ConvLayout) -> None:
        """Read the engine's config."""
        self._config, self._conv_layout = config, conv_layout
        self._tp: int = config.parallel_config.tensor_parallel_size

    def layer(self, found: FoundCache) -> LayerSpec:
        """Return what the layer keeps.

        Raises `EngineUnsupportedError` that names what is missing.
        """
        cache, spec, module, drafted = found
        if isinstance(spec, MambaSpec):
            if drafted:
                raise unsaid(cache.name, "recurrent states of a draft are not handed over")
            return self._states(cache, spec)
        self._check_form(cache, spec)
        dtype, scales = kv_type(cache.name, spec, module)
        if isinstance(spec, MLAAttentionSpec):
            return latent_layer(cache.layer, spec.head_size, dtype, scales)
        return attention_layer(
            cache.name,
            cache.layer,
            SaidHeads(spec.num_kv_heads, self._all_heads(found), self._tp),
            (spec.head_size, spec.head_size_v),
            dtype,
            _window_tokens(cache, spec, module),
            scales,
        )

    def _check_form(self, cache: LayerCache, spec: Any) -> None:
        """Refuse a cache that holds more or other than its kind says."""
        if type(spec) not in (FullAttentionSpec, SlidingWindowSpec, MLAAttentionSpec):
            raise unsaid(
                cache.name, f"what a cache of kind {type(spec).__name__} keeps is not known"
            )
        role = getattr(spec, "cache_role", SparseCacheRole.SPARSE)
        form = {
            "tokens_per_state": (spec.tokens_per_state, 1),
            "num_head_slots": (spec.num_head_slots or spec.num_kv_heads, spec.num_kv_heads),
            "state_content_size_bytes": (
                spec.state_content_size_bytes,
                (spec.head_size + spec.head_size_v) * dtype_of(spec.dtype).itemsize_bytes,
            ),
            "cache_role": (role.value, SparseCacheRole.SPARSE.value),
            "model_version": (getattr(spec, "model_version", None), None),
        }
        for what, (found, wanted) in form.items():
            if found != wanted:
                raise unsaid(
                    cache.name,
                    f"{type(spec).__name__} with {what} {found} in place of {wanted}: "
                    "how its elements lie is missing",
                )

    def _all_heads(self, found: FoundCache) -> int:
        """Return how many KV heads the layer has over all ranks; layers may differ in it."""
        cache, spec = found.cache, found.spec
        if found.drafted and self._tp == 1:
            return int(spec.num_kv_heads)
        try:
            heads: int
            if found.drafted:
                heads = self._config.speculative_config.draft_model_config.get_total_num_kv_heads()
            else:
                heads = self._config.model_config.model_arch_config[cache.layer].total_num_kv_heads
        except IndexError:
            raise unsaid(cache.name, f"vLLM's model config has no layer {cache.layer}") from None
        return heads

    def _states(self, cache: LayerCache, spec: MambaSpec) -> LayerSpec:
        extra_rows = self._config.num_speculative_tokens if self._config.speculative_config else 0
        said = SaidStates(
            spec.mamba_type.name,
            self._undivided(cache),
            tuple(dtype_of(dtype) for dtype in spec.dtypes),
            self._conv_layout,
            extra_rows,
            spec.tp_replicated,
        )
        return state_layer(cache.name, cache.layer, said)

    def _undivided(self, cache: LayerCache) -> Shapes:
        """Return the shapes of the cache's states at TP 1."""
        if self._tp == 1:
            return cache.state_shapes
        model = self._config.model_config
        made, _ = ModelRegistry.resolve_model_cls(model.architectures, model_config=model)
        whole = copy.copy(self._config)
        whole.parallel_config = copy.copy(whole.parallel_config)
        whole.parallel_config.tensor_parallel_size = 1
        for ours, undivided in zip(_shapes(made, self._config), _shapes(made, whole), strict=True):
            if ours == cache.state_shapes:
                return undivided
        raise unsaid(
            cache.name,
            f"how TP {self._tp} cuts states of {cache.state_shapes} is missing: {made.__name__} "
            f"says {_shapes(made, self._config)}",
        )


def _shapes(model: Any, config: VllmConfig) -> list[Shapes]:
    """Return the shapes of each kind of state that the model's class has."""
    if hasattr(model, "get_mamba_specs_from_config"):
        found = [spec.shapes for spec in model.get_mamba_specs_from_config(config)]
    elif hasattr(model, "get_mamba_state_shape_from_config"):
        found = [model.get_mamba_state_shape_from_config(config)]
    else:
        found = []
    return [tuple(tuple(shape) for shape in shapes) for shapes in found]


def _window_tokens(cache: LayerCache, spec: Any, module: Any) -> int:
    """Return how many tokens the next one sees before itself, which vLLM counts too.

    It gives a group of full caches the window of any of its layers.
    """
    window: int | None = spec.sliding_window
    if window and not isinstance(spec, SlidingWindowSpec):
        window = getattr(module, "sliding_window", None)
    if window == 1:
        raise unsaid(cache.name, "a window of 1 token, in which nothing is kept, is not known")
    return window - 1 if window else 0
