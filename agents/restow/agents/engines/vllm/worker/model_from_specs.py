"""Make a model from vLLM's own specs and model config, for a rank's caches.

So an engine can be served whose ``model_type`` no family has. Other engines' models are checked.
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

from restow.agents.engines.common.adapter_errors import EngineUnsupportedError
from restow.agents.engines.vllm.worker.kv_caches import FoundCache, kv_type
from restow.agents.engines.vllm.worker.layers_from_specs import (
    RankHeads,
    StateShapes,
    attention_layer,
    check_agreement,
    engine_model,
    latent_layer,
    state_layer,
    unsupported_layer,
)
from restow.agents.engines.vllm.worker.rank_layout import LayerCache, dtype_of, layer_of
from restow.agents.engines.vllm.worker.untested_forms import (
    TOKEN_HEAD_SCALE_BYTES,
    TOKEN_HEAD_TYPES,
    untested_layer,
)
from restow.broker.families import AttentionSpec, ConvLayout, LayerSpec, MlaSpec, ModelSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig


Shapes = tuple[tuple[int, ...], ...]


def rank_model(
    name: str,
    known: ModelSpec | None,
    caches: Iterable[FoundCache],
    config: VllmConfig,
    conv_layout: ConvLayout,
    draft: str = "",
    allow_untested: bool = False,
) -> ModelSpec:
    """Return the model of a rank's caches: the ``known`` model, if vLLM's specs agree with it.

    Types and scales are those of the caches. The layers of a draft, which the model's config does
    not have, always come from vLLM's specs; ``draft`` is a word for the draft model. Raises
    `CacheUnknownError` with both numbers where config and specs differ, and for an unknown model
    `EngineUnsupportedError` that names what the specs leave open. ``allow_untested`` serves what
    they determine and no test has run.
    """
    specs, caches = _SpecLayers(config, conv_layout, allow_untested), list(caches)
    own = [entry for entry in caches if not entry.drafted]
    drafts = engine_model(
        name, [_distinct((entry for entry in caches if entry.drafted), specs)]
    ).layers
    if drafts:
        model = rank_model(name, known, own, config, conv_layout, "", allow_untested)
        return replace(model, draft_layers=drafts, draft=draft)
    if known is None:
        return engine_model(name, [_distinct(own, specs)])
    layers = []
    for entry in own:
        spec = specs.typed(layer_of(known, entry.cache), entry)
        layers.append(spec)
        try:
            layer = specs.layer(entry)
        except EngineUnsupportedError:  # only the family has this layer
            continue
        check_agreement(entry.cache.name, spec, layer)
    return engine_model(name, [layers])


# -- inside ---------------------------------------------------------------------------------------


def _distinct(caches: Iterable[FoundCache], specs: _SpecLayers) -> Iterator[LayerSpec]:
    """Yield the layers of all caches. Refuse two caches of a kind that have the same number."""
    names: dict[tuple[int, tuple[bool, bool]], str] = {}
    for entry in caches:
        name = entry.cache.name
        other = names.setdefault((entry.cache.layer, entry.cache.kind), name)
        if other != name:
            raise unsupported_layer(
                name, f"{other} is layer {entry.cache.layer}, too: nothing tells them apart"
            )
        yield specs.layer(entry)


class _SpecLayers:
    """Makes a layer of each cache from vLLM's specs alone."""

    def __init__(self, config: VllmConfig, conv_layout: ConvLayout, allow_untested: bool) -> None:
        """Read the engine's config."""
        self._config, self._conv_layout = config, conv_layout
        self._allow_untested = allow_untested
        self._tp: int = config.parallel_config.tensor_parallel_size

    def layer(self, found: FoundCache) -> LayerSpec:
        """Return the layer of a cache.

        Raises `EngineUnsupportedError` that names what is missing.
        """
        cache, spec, module, drafted = found
        if isinstance(spec, MambaSpec):
            if drafted:
                raise unsupported_layer(
                    cache.name, "recurrent states of a draft are not handed over"
                )
            return self._states(cache, spec)
        named = cache.name, cache.layer, spec, module, self._allow_untested
        if not drafted and (untested := untested_layer(*named)) is not None:
            return untested
        dtype, scales = kv_type(cache.name, spec, module, self._allow_untested)
        self._check_form(cache, spec)
        if isinstance(spec, MLAAttentionSpec):
            return latent_layer(cache.layer, spec.head_size, dtype, scales)
        return attention_layer(
            cache.name,
            cache.layer,
            RankHeads(spec.num_kv_heads, self._all_heads(found), self._tp),
            (spec.head_size, spec.head_size_v),
            dtype,
            _window_tokens(cache, spec, module),
            scales,
        )

    def typed(self, known: LayerSpec, found: FoundCache) -> LayerSpec:
        """Return a known layer in the cache's type, with its scales.

        Raises `EngineUnsupportedError`.
        """
        cache, spec, module, _ = found
        untested = untested_layer(cache.name, cache.layer, spec, module, self._allow_untested)
        if untested is not None:
            return untested
        if not isinstance(known, AttentionSpec | MlaSpec):
            return known
        dtype, scales = kv_type(cache.name, spec, module, self._allow_untested)
        return replace(known, dtype=dtype, scales=scales)

    def _check_form(self, cache: LayerCache, spec: Any) -> None:
        """Refuse a cache that does not hold what its kind has."""
        if type(spec) not in (FullAttentionSpec, SlidingWindowSpec, MLAAttentionSpec):
            raise unsupported_layer(
                cache.name, f"the content of a cache of kind {type(spec).__name__} is not known"
            )
        role = getattr(spec, "cache_role", SparseCacheRole.SPARSE)
        form = {
            "tokens_per_state": (spec.tokens_per_state, 1),
            "num_head_slots": (spec.num_head_slots or spec.num_kv_heads, spec.num_kv_heads),
            "state_content_size_bytes": (
                spec.state_content_size_bytes,
                (spec.head_size + spec.head_size_v) * dtype_of(spec.dtype).itemsize_bytes
                + TOKEN_HEAD_SCALE_BYTES * (spec.kv_quant_mode in TOKEN_HEAD_TYPES),
            ),
            "cache_role": (role.value, SparseCacheRole.SPARSE.value),
            "model_version": (getattr(spec, "model_version", None), None),
        }
        for what, (value, wanted) in form.items():
            if value != wanted:
                raise unsupported_layer(
                    cache.name,
                    f"{type(spec).__name__} with {what} {value} in place of {wanted}: "
                    "how its elements lie is missing",
                )

    def _all_heads(self, found: FoundCache) -> int:
        """Return the number of KV heads that the layer has over all ranks. Layers may differ."""
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
            raise unsupported_layer(
                cache.name, f"vLLM's model config has no layer {cache.layer}"
            ) from None
        return heads

    def _states(self, cache: LayerCache, spec: MambaSpec) -> LayerSpec:
        extra_rows = self._config.num_speculative_tokens if self._config.speculative_config else 0
        specs = StateShapes(
            spec.mamba_type.name,
            self._undivided(cache),
            tuple(dtype_of(dtype) for dtype in spec.dtypes),
            self._conv_layout,
            extra_rows,
            spec.tp_replicated,
        )
        return state_layer(cache.name, cache.layer, specs)

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
        raise unsupported_layer(
            cache.name,
            f"how TP {self._tp} cuts states of {cache.state_shapes} is missing: {made.__name__} "
            f"has {_shapes(made, self._config)}",
        )


def _shapes(model: Any, config: VllmConfig) -> list[Shapes]:
    """Return the shapes of each kind of state that the model's class has."""
    if hasattr(model, "get_mamba_specs_from_config"):
        kinds = [spec.shapes for spec in model.get_mamba_specs_from_config(config)]
    elif hasattr(model, "get_mamba_state_shape_from_config"):
        kinds = [model.get_mamba_state_shape_from_config(config)]
    else:
        kinds = []
    return [tuple(tuple(shape) for shape in shapes) for shapes in kinds]


def _window_tokens(cache: LayerCache, spec: Any, module: Any) -> int:
    """Return how many tokens before itself a token sees. vLLM's window counts the token itself.

    vLLM gives a group of full caches the window of any of its layers.
    """
    window: int | None = spec.sliding_window
    if window and not isinstance(spec, SlidingWindowSpec):
        window = getattr(module, "sliding_window", None)
    if window == 1:
        raise unsupported_layer(cache.name, "a window of 1 token keeps nothing, and is unknown")
    return window - 1 if window else 0
