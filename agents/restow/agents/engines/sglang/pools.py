"""Make a rank's layout of SGLang's memory pools, and check it against the model's config.

SGLang keeps keys and values apart, ``[slot, head, dim]``; a page of the layout is a page of slots.
A Mamba slot has its conv window, ``[channel, tap]``, and its recurrent state in pools of their own.
Page 0 and slot 0 of each pool take the writes of padding, so they stand for no block.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

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
    layer_count: int


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank stands: its number among the ranks of tensor parallelism, and their number."""

    rank: int
    tp: int


def rank_pools(folder: Path, params: CacheInitParams, place: Place) -> RankPools:
    """Return the layout of a rank's pools, for the model whose config lies in ``folder``.

    Raises `EngineUnsupportedError` for pools that no layout of ours expresses, and
    `CacheUnknownError` where a pool differs from the model.
    """
    pools = _Pools(params)
    config = json.loads((folder / "config.json").read_text())
    model = model_from_hf_config(config, **pools.dtypes())
    # As other adapters order layers: of one layer, attention comes first.
    layers = sorted(model.layers, key=lambda spec: (spec.layer, isinstance(spec, RecurrentSpec)))
    model = ModelSpec(model.name, tuple(layers), quantisation=model.quantisation)
    settings = EngineSettings(
        tp=place.tp,
        page_tokens=params.page_size,
        conv_layout=ConvLayout.DS,
        kv_order=KvOrder.NHD,
        kv_packed=False,
        null_block=NULL_BLOCK,
        whole_blocks=True,
    )
    regions: list[Region] = []
    shards: list[Shard] = []
    memory: list[RegionMemory] = []
    for spec in layers:
        for region, tensor, held in _laid(spec, settings, place.rank, pools):
            rows = 1 if region.page_tokens is None else region.page_tokens
            stride = tensor.stride(0) * tensor.element_size() * rows
            regions.append(replace(region, page_stride_bytes=stride))
            shards += held
            kind = MemoryKind.CUDA if tensor.is_cuda else MemoryKind.HOST
            count, device = tensor.shape[0] // rows, tensor.device.index or 0
            memory.append(RegionMemory(region.name, tensor.data_ptr(), count, stride, kind, device))
    groups = {region.group: _group(region.group, layers, params.page_size) for region in regions}
    if WINDOW in groups and groups[WINDOW].window_tokens > (params.sliding_window_size or 0):
        raise CacheUnknownError(
            f"the model's windows need {groups[WINDOW].window_tokens} tokens, and SGLang keeps "
            f"{params.sliding_window_size}"
        )
    layout = RankLayout(place.rank, tuple(regions), tuple(shards))
    return RankPools(model, layout, tuple(memory), groups, 1 + max(spec.layer for spec in layers))


def _group(name: str, layers: list[LayerSpec], page_tokens: int) -> Group:
    if name == STATE:
        return Group(name, page_tokens, 0)
    windows = [spec.window_tokens for spec in layers if isinstance(spec, AttentionSpec)]
    return Group(name, page_tokens, None, max(windows) if name == WINDOW else 0, True)


class _Pools:
    """SGLang's pools, by the kind of their layers."""

    def __init__(self, params: CacheInitParams) -> None:
        kv = params.token_to_kv_pool_allocator.get_kvcache()
        self.window: dict[int, int] = {}
        self.window_pool: MHATokenToKVPool | None = None
        if type(kv) is SWAKVPool:
            places = kv.layers_mapping.items()
            self.full = {layer: index for layer, (index, swa) in places if not swa}
            self.window = {layer: index for layer, (index, swa) in places if swa}
            self.full_pool, self.window_pool = kv.full_kv_pool, kv.swa_kv_pool
        elif type(kv) is HybridLinearKVPool:
            self.full, self.full_pool = kv.full_attention_layer_id_mapping, kv.full_kv_pool
        else:
            self.full_pool = kv
            self.full = {
                layer: index for index, layer in enumerate(getattr(kv, "model_layer_ids", ()))
            }
        self.mamba: dict[int, int] = getattr(params.req_to_token_pool, "mamba_map", {})
        self.mamba_pool = getattr(params.req_to_token_pool, "mamba_pool", None)
        self._check(params)

    def _check(self, params: CacheInitParams) -> None:
        """Refuse pools whose content or order is not known."""
        for pool in (self.full_pool, self.window_pool):
            if pool is None:
                continue
            if type(pool) is not MHATokenToKVPool:
                raise _unsupported(f"keys and values in a {type(pool).__name__}")
            if pool.kv_cache_layout != "nhd":
                raise _unsupported(f"keys and values in the order {pool.kv_cache_layout}")
            if pool.is_quantized_kv_cache or not pool.dtype.itemsize >= 2:
                raise _unsupported(f"keys and values of type {pool.dtype}, with scales apart")
        if self.mamba_pool is None:
            return
        if type(self.mamba_pool) is not MambaPool:
            raise _unsupported(f"recurrent states in a {type(self.mamba_pool).__name__}")
        side, cache = params.req_to_token_pool, self.mamba_pool.mamba_cache
        for what, there in (
            ("states in int8 (mamba_ckpt_pool)", side.mamba_ckpt_pool is not None),
            ("states beside the recurrent state (short_conv_pool)", side.short_conv_pool.enabled),
            ("states beside the recurrent state (ngram_pool)", side.ngram_pool.enabled),
            ("states that are replayed (ReplaySSM)", cache.replayssm_g is not None),
            (f"{len(cache.conv)} conv windows in a layer", len(cache.conv) != 1),
        ):
            if there:
                raise _unsupported(what)

    def dtypes(self) -> dict[str, DType]:
        """Return the types of the pools, as `model_from_hf_config` takes them."""
        types = {"kv_dtype": _dtype(self.full_pool.dtype)}
        if self.mamba_pool is not None:
            cache = self.mamba_pool.mamba_cache
            types |= {
                "conv_dtype": _dtype(cache.conv[0].dtype),
                "ssm_dtype": _dtype(cache.temporal.dtype),
            }
        return types

    def of_layer(self, spec: AttentionSpec) -> tuple[str, Mapping[str, torch.Tensor]]:
        """Return the group of an attention layer, and its keys and values."""
        for name, places, pool in (
            (ATTENTION, self.full, self.full_pool),
            (WINDOW, self.window, self.window_pool),
        ):
            if pool is not None and spec.layer in places:
                index = places[spec.layer]
                return name, {"k": pool.k_buffer[index], "v": pool.v_buffer[index]}
        raise _unlike(f"layers.{spec.layer}", "keys and values", "no pool for them")


Laid = tuple[Region, torch.Tensor, tuple[Shard, ...]]


def _laid(spec: LayerSpec, settings: EngineSettings, rank: int, pools: _Pools) -> Iterator[Laid]:
    """Yield each region of a layer with its pool's tensor and its shards."""
    if isinstance(spec, AttentionSpec):
        group, tensors = pools.of_layer(spec)
        if group == WINDOW and not spec.window_tokens:
            raise _unlike(f"layers.{spec.layer}", "attention to all tokens", "a window")
        pages = layer_pages(spec, settings, rank)
        for region, shard in zip(pages.regions, pages.shards, strict=True):
            tensor = tensors[region.name.rsplit(".", 1)[1]]
            shape = tuple(span.size for span in shard.box)
            _check_tensor(region.name, tensor, shape, shard.dtype)
            yield replace(region, group=group), tensor, (shard,)
    elif isinstance(spec, Mamba2Spec | GdnSpec) and spec.layer in pools.mamba:
        yield from _recurrent(spec, settings, rank, pools)
    else:
        raise _unsupported(f"layer {spec.layer}: {type(spec).__name__}")


def _recurrent(
    spec: RecurrentSpec, settings: EngineSettings, rank: int, pools: _Pools
) -> Iterator[Laid]:
    """Yield a layer's windows, whose channels SGLang has in the family's order, and its states."""
    cache, index = pools.mamba_pool.mamba_cache, pools.mamba[spec.layer]
    pages = layer_pages(spec, settings, rank)
    (region,), count = pages.regions, len(spec.recurrence().conv)
    windows, states = pages.shards[:count], pages.shards[count:]
    channels = sum(math.prod(span.size for span in shard.box[:-1]) for shard in windows)
    conv, temporal = cache.conv[0][index], cache.temporal[index]
    shape = (channels, spec.recurrence().taps)
    name = f"layers.{spec.layer}"
    _check_tensor(f"{name}.conv", conv, shape, windows[0].dtype)
    _check_tensor(
        f"{name}.state", temporal, tuple(span.size for span in states[0].box), states[0].dtype
    )
    before_bytes = states[0].offset_bytes
    for part, tensor, shards, start in (
        ("conv", conv, windows, 0),
        ("state", temporal, states, before_bytes),
    ):
        named = f"{name}.{part}"
        moved = tuple(
            replace(shard, region=named, offset_bytes=shard.offset_bytes - start)
            for shard in shards
        )
        yield replace(region, name=named, group=STATE), tensor, moved


def _check_tensor(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: DType) -> None:
    """Refuse a pool whose rows do not have this shape and type, without gaps."""
    if tuple(tensor.shape[1:]) != shape or _dtype(tensor.dtype) is not dtype:
        found = f"{tuple(tensor.shape[1:])} of {tensor.dtype}"
        raise _unlike(name, f"{shape} of {dtype.label}", found)
    if not tensor[0].is_contiguous():
        raise _unlike(name, "rows without gaps", f"strides {tensor.stride()}")


def _dtype(dtype: torch.dtype) -> DType:
    return DType.parse(str(dtype).removeprefix("torch."))


def _unsupported(what: str) -> EngineUnsupportedError:
    return EngineUnsupportedError(f"SGLang's pools: {what} is not shared by Restow's linker")


def _unlike(name: str, wanted: object, found: object) -> CacheUnknownError:
    return CacheUnknownError(
        f"{name}: the model's config and parallelism say {wanted}; SGLang's pool has {found}",
        layer=name,
    )
