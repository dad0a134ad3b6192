"""vLLM's cache config and tensors become the connector's own values (`v1/kv_cache_interface.py`).

Beside `connector`, `engine_checks`, `kv_order`, `kv_scales`, `said_caches` and `scheduler.metrics`
no other module needs vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
    iter_layer_specs,
)

from restow.agents.engines.common.groups import Group
from restow.agents.engines.vllm.errors import CacheUnknownError, EngineUnsupportedError
from restow.agents.engines.vllm.worker.draft_layers import DraftLayers
from restow.agents.engines.vllm.worker.kv_order import kv_order
from restow.agents.engines.vllm.worker.layer_numbers import LayerNumbers
from restow.agents.engines.vllm.worker.rank_layout import LayerCache, dtype_of
from restow.broker.errors import UnknownModelError
from restow.broker.families import KvOrder, ModelSpec
from restow.broker.families.hf import model_from_hf_config
from restow.broker.layout import DType

UNQUANTISED = DType.BFLOAT16


class FoundCache(NamedTuple):
    """A layer's cache, what vLLM says of it, vLLM's layer, and whether that is one of a draft."""

    cache: LayerCache
    spec: KVCacheSpec
    module: Any
    drafted: bool = False


def known_model(hf_config: Mapping[str, Any], config: KVCacheConfig) -> ModelSpec | None:
    """Return what the config says, in the types of vLLM's caches; None for a type without family.

    Keys and values that are quantised have the type `UNQUANTISED`: the cache itself says of which
    type they are. Raises `LayoutFormError`.
    """
    kv: DType | None = None
    conv: DType | None = None
    ssm: DType | None = None
    for group in config.transfer_groups:
        for spec in iter_layer_specs(group.kv_cache_spec):
            if isinstance(spec, MambaSpec):
                conv, ssm = dtype_of(spec.dtypes[0]), dtype_of(spec.dtypes[-1])
            elif isinstance(spec, AttentionSpec):
                quantised = spec.kv_quant_mode is not KVQuantMode.NONE
                kv = UNQUANTISED if quantised else dtype_of(spec.dtype)
    try:
        return model_from_hf_config(hf_config, kv_dtype=kv, conv_dtype=conv, ssm_dtype=ssm)
    except UnknownModelError:
        return None


def groups_of(
    windows: Mapping[str, int], config: KVCacheConfig, whole_blocks: bool
) -> tuple[Group, ...]:
    """Return the groups whose state is handed over, with the windows of their layers."""
    found = []
    for index, group in enumerate(config.transfer_groups):
        name, spec = _group_name(index), group.kv_cache_spec
        window = windows.get(name, 0)
        found.append(Group(name, spec.block_size, _scratch(spec), window, whole_blocks))
    return tuple(found)


def layer_caches(
    config: KVCacheConfig,
    tensors: Mapping[str, torch.Tensor],
    layers: Mapping[str, Any],
    numbers: LayerNumbers,
    drafts: DraftLayers,
) -> Iterator[FoundCache]:
    """Yield every layer's cache on this rank, in the order of the groups.

    ``layers`` are vLLM's own (`static_forward_context`), which know how they write. One that reads
    another's cache has none of its own.
    """
    for index, group in enumerate(config.transfer_groups):
        places: dict[int, str] = {}
        for name in group.layer_names:
            tensor, module = tensors.get(name), layers.get(name)
            if tensor is None:  # another stage's
                continue
            if getattr(module, "kv_sharing_target_layer_name", None):
                continue
            other = places.setdefault(tensor.data_ptr(), name)
            if other != name:
                raise CacheUnknownError(
                    f"{name} and {other} have one cache, and neither says that it is the other's",
                    layer=name,
                )
            spec = _spec_of(group.kv_cache_spec, name)
            pages, blocks = tensor.shape[0], config.num_blocks
            if pages % blocks:
                raise CacheUnknownError(
                    f"{name}: {pages} pages are no multiple of {blocks} blocks", layer=name
                )
            state = isinstance(spec, MambaSpec)
            # Of a latent there is one a token: it lies in the order of the tokens.
            plain = state or isinstance(spec, MLAAttentionSpec)
            number = _number(name)
            layer = numbers.layer(number, state)
            drafted = drafts.layer(name, number, layer)
            cache = LayerCache(
                name,
                layer if drafted is None else drafted,
                _group_name(index),
                tensor,
                pages // blocks,
                KvOrder.HND if plain else kv_order(name, tensor, module),
                tuple(tuple(shape) for shape in spec.shapes) if state else (),
                tuple(spec.dtypes) if state else (),
            )
            yield FoundCache(cache, spec, module, drafted is not None)


def _number(name: str) -> int:
    """Return the one number in a layer's name. Raises `EngineUnsupportedError`."""
    try:
        number: int = extract_layer_index(name)
    except (AssertionError, ValueError) as error:
        raise EngineUnsupportedError(f"{name}: which layer it is is missing: {error}") from None
    return number


def _spec_of(spec: KVCacheSpec, layer_name: str) -> KVCacheSpec:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return spec.kv_cache_specs[layer_name]
    return spec


def _scratch(spec: KVCacheSpec) -> int | None:
    first = next(iter(iter_layer_specs(spec)))
    return first.num_speculative_blocks if isinstance(first, MambaSpec) else None


def _group_name(index: int) -> str:
    return f"group.{index}"
