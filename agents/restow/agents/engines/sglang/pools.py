"""Make a rank's layout of SGLang's memory pools, and check it against the model's config.

SGLang keeps keys and values apart, ``[slot, head, dim]``; a page of the layout is a page of slots.
A Mamba slot has its conv window, ``[channel, tap]``, and its recurrent state in pools of their own.
Page 0 and slot 0 of each pool take the writes of padding, so they stand for no block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MambaPool, MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from restow.agents.engines.common.adapter_errors import CacheUnknownError, EngineUnsupportedError
from restow.agents.engines.common.blocks import NULL_BLOCK, Group
from restow.agents.memory.regions import MemoryKind, RegionMemory
from restow.broker.families import (
    AttentionSpec,
    ConvLayout,
    EngineSettings,
    GdnSpec,
    KvOrder,
    LayerSpec,
    Mamba2Spec,
    ModelSpec,
    RecurrentSpec,
)
from restow.broker.families.build import layer_pages
from restow.broker.families.hf import model_from_hf_config
from restow.broker.layout import DType, RankLayout, Region, Shard

if TYPE_CHECKING:
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

ATTENTION, WINDOW, STATE = "attention", "window", "state"


@dataclass(frozen=True, slots=True)
class RankPools:
    """The layout of a rank, the memory of its regions in the same order, and its groups by name."""

    model: ModelSpec
    layout: RankLayout
    memory: tuple[RegionMemory, ...]
    groups: Mapping[str, Group]

    @property
    def layer_count(self) -> int:
        """The number of layers that a forward may wait for."""
        return 1 + max(spec.layer for spec in self.model.layers)

    @property
    def on_device(self) -> bool:
        """Whether the pools lie on a device, whose work must be waited for."""
        return self.memory[0].kind is MemoryKind.CUDA


def rank_pools(config: Mapping[str, Any], params: CacheInitParams, rank: int, tp: int) -> RankPools:
    """Return the layout of a rank's pools, for the model of a Hugging Face ``config``.

    Raises `EngineUnsupportedError` for pools that no layout of ours expresses, and
    `CacheUnknownError` where a pool differs from the model.
    """
    pools = _Pools(params)
    model = pools.model(config)
    # As other adapters order layers: of one layer, attention comes first.
    layers = sorted(model.layers, key=lambda spec: (spec.layer, isinstance(spec, RecurrentSpec)))
    model = ModelSpec(model.name, tuple(layers), quantisation=model.quantisation)
    settings = EngineSettings(
        tp=tp,
        page_tokens=params.page_size,
        conv_layout=ConvLayout.DS,
        kv_order=KvOrder.NHD,
        kv_packed=False,
        null_block=NULL_BLOCK,
        whole_blocks=True,
    )
    laid = [one for spec in layers for one in pools.laid(spec, settings, rank)]
    regions = tuple(region for region, _, _ in laid)
    groups = {}
    for name in dict.fromkeys(region.group for region in regions):
        windows = [getattr(spec, "window_tokens", 0) for spec in layers] if name == WINDOW else [0]
        scratch = 0 if name == STATE else None
        groups[name] = Group(name, params.page_size, scratch, max(windows), name != STATE)
        if name == WINDOW and max(windows) != params.sliding_window_size:
            raise _unlike(name, f"windows of {max(windows)} tokens", params.sliding_window_size)
    shards = tuple(shard for _, _, held in laid for shard in held)
    memory = tuple(_memory(region, tensor) for region, tensor, _ in laid)
    return RankPools(model, RankLayout(rank, regions, shards), memory, groups)


def _memory(region: Region, tensor: torch.Tensor) -> RegionMemory:
    kind = MemoryKind.CUDA if tensor.is_cuda else MemoryKind.HOST
    count = tensor.shape[0] // (region.page_tokens or 1)
    where = tensor.data_ptr(), count, region.page_stride_bytes
    return RegionMemory(region.name, *where, kind, tensor.device.index or 0)


Laid = tuple[Region, torch.Tensor, tuple[Shard, ...]]


class _Pools:
    """SGLang's pools, by the kind of their layers."""

    def __init__(self, params: CacheInitParams) -> None:
        kv, requests = params.token_to_kv_pool_allocator.get_kvcache(), params.req_to_token_pool
        if type(kv) is SWAKVPool:
            pools, swa = [kv.full_kv_pool, kv.swa_kv_pool], kv.layers_mapping.items()
            places = {layer: (WINDOW if some else ATTENTION, at) for layer, (at, some) in swa}
        elif type(kv) is HybridLinearKVPool:
            pools, full = [kv.full_kv_pool], kv.full_attention_layer_id_mapping.items()
            places = {layer: (ATTENTION, at) for layer, at in full}
        else:
            pools, plain = [kv], getattr(kv, "model_layer_ids", ())
            places = {layer: (ATTENTION, at) for at, layer in enumerate(plain)}
        self._kv: Mapping[int, tuple[str, int]] = places
        self._pools: Mapping[str, Any] = dict(zip((ATTENTION, WINDOW), pools, strict=False))
        self._mamba_layers: Mapping[int, int] = getattr(requests, "mamba_map", {})
        self._mamba: Any = getattr(requests, "mamba_pool", None)
        for pool in pools:
            for what, there in {
                f"keys and values in a {type(pool).__name__}": type(pool) is not MHATokenToKVPool,
                f"keys and values of {pool.dtype}, with scales": pool.dtype.itemsize < 2,
                "keys and values in another order": getattr(pool, "kv_cache_layout", "") != "nhd",
            }.items():
                _refuse(what, there)
        if self._mamba is not None:
            cache = self._mamba.mamba_cache
            for what, there in {
                "a pool of recurrent states of its own": type(self._mamba) is not MambaPool,
                "states in int8 (mamba_ckpt_pool)": requests.mamba_ckpt_pool is not None,
                "states beside the recurrent state": self._mamba._slot_siblings,
                "states that are replayed (ReplaySSM)": cache.replayssm_g is not None,
                "several conv windows in a layer": len(cache.conv) != 1,
            }.items():
                _refuse(what, bool(there))

    def model(self, config: Mapping[str, Any]) -> ModelSpec:
        """Return the config's model, in the types of the pools."""
        kv, cache = _dtype(self._pools[ATTENTION].dtype), getattr(self._mamba, "mamba_cache", None)
        if cache is None:
            return model_from_hf_config(config, kv)
        return model_from_hf_config(
            config, kv, _dtype(cache.conv[0].dtype), _dtype(cache.temporal.dtype)
        )

    def laid(self, spec: LayerSpec, settings: EngineSettings, rank: int) -> Iterator[Laid]:
        """Yield each region of a layer with its pool's tensor and its shards."""
        if isinstance(spec, Mamba2Spec | GdnSpec) and spec.layer in self._mamba_layers:
            yield from self._recurrent(spec, settings, rank)
            return
        there = isinstance(spec, AttentionSpec) and spec.layer in self._kv
        _refuse(f"layer {spec.layer} ({type(spec).__name__})", not there)
        group, at = self._kv[spec.layer]
        pool = self._pools[group]
        pages = layer_pages(spec, settings, rank)
        tensors = pool.k_buffer[at], pool.v_buffer[at]
        for region, shard, tensor in zip(pages.regions, pages.shards, tensors, strict=True):
            _check(shard.field, tensor, tuple(span.size for span in shard.box), shard.dtype)
            yield replace(region, group=group), tensor, (shard,)

    def _recurrent(
        self, spec: RecurrentSpec, settings: EngineSettings, rank: int
    ) -> Iterator[Laid]:
        """Yield a layer's windows, with channels in the family's order, and its states."""
        cache, at = self._mamba.mamba_cache, self._mamba_layers[spec.layer]
        pages, form = layer_pages(spec, settings, rank), spec.recurrence()
        windows, states = pages.shards[: len(form.conv)], pages.shards[len(form.conv) :]
        channels = sum(math.prod(span.size for span in shard.box[:-1]) for shard in windows)
        boxes = (channels, form.taps), tuple(span.size for span in states[0].box)
        for part, tensor, shards, shape in (
            ("conv", cache.conv[0][at], windows, boxes[0]),
            ("state", cache.temporal[at], states, boxes[1]),
        ):
            name, start = f"layers.{spec.layer}.{part}", shards[0].offset_bytes
            _check(name, tensor, shape, shards[0].dtype)
            stride = tensor.stride(0) * tensor.element_size()
            region = replace(pages.regions[0], name=name, group=STATE, page_stride_bytes=stride)
            yield (
                region,
                tensor,
                tuple(
                    replace(shard, region=name, offset_bytes=shard.offset_bytes - start)
                    for shard in shards
                ),
            )


def _check(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: DType) -> None:
    """Refuse a pool whose rows do not have this shape and type, without gaps."""
    found = tuple(tensor.shape[1:]), _dtype(tensor.dtype)
    if found != (shape, dtype):
        raise _unlike(name, f"{shape} of {dtype.label}", f"{found[0]} of {found[1].label}")
    if not tensor.is_contiguous():
        raise _unlike(name, "rows without gaps", f"strides {tensor.stride()}")


def _dtype(dtype: torch.dtype) -> DType:
    return DType.parse(str(dtype).removeprefix("torch."))


def _refuse(what: str, there: bool) -> None:
    if there:
        raise EngineUnsupportedError(f"SGLang with {what}: Restow's linker does not share that")


def _unlike(name: str, wanted: object, found: object) -> CacheUnknownError:
    return CacheUnknownError(
        f"{name}: the model's config and parallelism say {wanted}; SGLang's pool has {found}",
        layer=name,
    )
