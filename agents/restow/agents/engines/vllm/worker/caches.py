"""vLLM's cache config and tensors become the connector's own values (`v1/kv_cache_interface.py`).

Beside `connector`, `kv_order` and `scheduler.metrics` no other module needs vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    UniformTypeKVCacheSpecs,
)

from restow.agents.engines.common.groups import Group
from restow.agents.engines.vllm.errors import CacheUnknownError
from restow.agents.engines.vllm.worker.kv_order import kv_order
from restow.agents.engines.vllm.worker.rank_layout import LayerCache, dtype_of
from restow.broker.families import KvOrder, ModelSpec, model_from_hf_config
from restow.broker.layout import DType


def model_spec(hf_config: Mapping[str, Any], config: KVCacheConfig) -> ModelSpec:
    """Return the model's state, in the types of vLLM's caches. Raises as `model_from_hf_config`."""
    kv: DType | None = None
    conv: DType | None = None
    ssm: DType | None = None
    for group in config.transfer_groups:
        for spec in _specs(group.kv_cache_spec):
            if isinstance(spec, MambaSpec):
                conv, ssm = dtype_of(spec.dtypes[0]), dtype_of(spec.dtypes[-1])
            elif isinstance(spec, AttentionSpec):
                kv = dtype_of(spec.dtype)
    return model_from_hf_config(hf_config, kv_dtype=kv, conv_dtype=conv, ssm_dtype=ssm)


def groups_of(model: ModelSpec, config: KVCacheConfig) -> tuple[Group, ...]:
    """Return the groups whose state is handed over. Raises `CacheUnknownError`."""
    # A layer may have a spec of its recurrent part, too, which says nothing of windows.
    windows = {
        spec.layer: window for spec in model.layers if (window := getattr(spec, "window_tokens", 0))
    }
    found = []
    for index, group in enumerate(config.transfer_groups):
        sizes = {windows.get(extract_layer_index(name), 0) for name in group.layer_names}
        if len(sizes) > 1:
            raise CacheUnknownError(
                f"{_group_name(index)} holds layers with windows of {sorted(sizes)} tokens",
                group=_group_name(index),
            )
        spec = group.kv_cache_spec
        found.append(Group(_group_name(index), spec.block_size, _scratch(spec), sizes.pop()))
    return tuple(found)


def layer_caches(
    config: KVCacheConfig, tensors: Mapping[str, torch.Tensor], layers: Mapping[str, Any]
) -> Iterator[LayerCache]:
    """Yield every layer's cache on this rank, in the order of the groups.

    ``layers`` are vLLM's own (`static_forward_context`), which know how they write.
    """
    for index, group in enumerate(config.transfer_groups):
        for name in group.layer_names:
            tensor = tensors.get(name)
            if tensor is None:  # another stage's
                continue
            spec = _spec_of(group.kv_cache_spec, name)
            pages, blocks = tensor.shape[0], config.num_blocks
            if pages % blocks:
                raise CacheUnknownError(
                    f"{name}: {pages} pages are no multiple of {blocks} blocks", layer=name
                )
            state = isinstance(spec, MambaSpec)
            yield LayerCache(
                name,
                extract_layer_index(name),
                _group_name(index),
                tensor,
                pages // blocks,
                KvOrder.HND if state else kv_order(name, tensor, layers.get(name)),
                tuple(tuple(shape) for shape in spec.shapes) if state else (),
                tuple(spec.dtypes) if state else (),
            )


def _specs(spec: KVCacheSpec) -> Iterator[KVCacheSpec]:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        yield from spec.kv_cache_specs.values()
    else:
        yield spec


def _spec_of(spec: KVCacheSpec, layer_name: str) -> KVCacheSpec:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return spec.kv_cache_specs[layer_name]
    return spec


def _scratch(spec: KVCacheSpec) -> int | None:
    first = next(_specs(spec))
    return first.num_speculative_blocks if isinstance(first, MambaSpec) else None


def _group_name(index: int) -> str:
    return f"group.{index}"
