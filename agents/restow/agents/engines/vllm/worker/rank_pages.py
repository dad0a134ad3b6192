"""`rank_pages` makes a rank's layout from vLLM's caches, and checks it by the model's config.

The family says what must lie where in a page; the tensors say where the pages are. Both must agree,
or nothing is served: a layout that is only believed gives wrong bytes without a word.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from restow.agents.engines.common.groups import NULL_BLOCK, group_name
from restow.agents.engines.vllm.errors import CacheUnknownError
from restow.agents.memory.regions import MemoryKind, RegionMemory
from restow.broker.families import (
    ConvLayout,
    EngineSettings,
    KvOrder,
    LayerSpec,
    ModelSpec,
    RecurrentSpec,
)
from restow.broker.families.pages import Pages, layer_pages
from restow.broker.layout import DType, RankLayout, Scratch
from restow.broker.words import Worded


@dataclass(frozen=True, slots=True, eq=False)
class LayerCache(Worded):
    """Holds one layer's cache as vLLM registered it.

    Attention: ``tensor`` ``[pages, heads, tokens, content]``, whose block has ``pages_per_block``
    pages. Recurrent: ``[blocks, 1, 1, bytes]``, the states ``state_shapes`` one behind the other.
    """

    name: str
    layer: int
    group: int
    tensor: torch.Tensor
    pages_per_block: int = 1
    kv_order: KvOrder = KvOrder.HND
    state_shapes: tuple[tuple[int, ...], ...] = ()
    state_dtypes: tuple[torch.dtype, ...] = ()

    @property
    def is_state(self) -> bool:
        """Whether a page holds snapshots."""
        return bool(self.state_shapes)

    def by_token(self) -> tuple[torch.Tensor, ...]:
        """Return views ``[pages, heads, tokens, ...]`` of all that tokens have in the cache."""
        tensor = self.tensor
        if self.kv_order is not KvOrder.HDN:
            return (tensor,)
        pages, heads, tokens, content = tensor.shape
        dim, (page, head, _, _) = content // 2, tensor.stride()
        start = tensor.storage_offset()
        shape = (pages, heads, tokens, dim)
        return (
            tensor.as_strided(shape, (page, head, 1, tokens), start),
            tensor.as_strided(shape, (page, head, dim, 1), start + tokens * dim),
        )


@dataclass(frozen=True, slots=True)
class RankShape(Worded):
    """Says where a rank stands, and how its engine keeps conv windows."""

    tp: int
    tp_rank: int
    rank: int
    conv_layout: ConvLayout
    conv_rows_extra: int


@dataclass(frozen=True, slots=True)
class RankPages:
    """Holds the layout of one rank, and the memory of its regions in the same order."""

    layout: RankLayout
    memory: tuple[RegionMemory, ...]


def rank_pages(model: ModelSpec, shape: RankShape, caches: Sequence[LayerCache]) -> RankPages:
    """Return the rank's layout. Raises `CacheUnknownError` for what is not as the model says."""
    laid = [_laid(_spec(model, cache), shape, cache) for cache in caches]
    layout = RankLayout(
        shape.rank,
        tuple(region for pages, _ in laid for region in pages.regions),
        tuple(shard for pages, _ in laid for shard in pages.shards),
        tuple(scratch for pages, _ in laid for scratch in pages.scratch),
    )
    return RankPages(layout, tuple(memory for _, memory in laid))


def dtype_of(tensor_dtype: torch.dtype) -> DType:
    """Return the layout's name of a torch dtype. Raises `LayoutFormError`."""
    return DType.parse(str(tensor_dtype).removeprefix("torch."))


# -- inside ---------------------------------------------------------------------------------------


def _spec(model: ModelSpec, cache: LayerCache) -> LayerSpec:
    """Return what the config says of the layer's cache."""
    for spec in model.layers:
        if spec.layer == cache.layer and isinstance(spec, RecurrentSpec) == cache.is_state:
            return spec
    kind = "recurrent state" if cache.is_state else "keys and values"
    raise CacheUnknownError(
        f"layer {cache.layer} ({cache.name}) keeps {kind}, of which the config of model "
        f"{model.name!r} says nothing: layers that are not the model's own (drafts of MTP or "
        "EAGLE) are not handed over yet",
        layer=cache.name,
    )


def _laid(spec: LayerSpec, shape: RankShape, cache: LayerCache) -> tuple[Pages, RegionMemory]:
    if isinstance(spec, RecurrentSpec):
        _check_state(spec, shape, cache)
        settings, page_tokens = _settings(shape), None
    else:
        tokens = cache.tensor.shape[2]
        settings, page_tokens = _settings(shape, tokens, cache.kv_order), tokens
    pages = layer_pages(spec, settings, shape.tp_rank)
    (region,) = pages.regions
    if page_tokens is not None:
        _check_tokens(pages, region.page_stride_bytes, cache)
    stride = cache.tensor.stride(0) * cache.tensor.element_size()
    if stride < region.page_stride_bytes:
        raise CacheUnknownError(
            f"{cache.name}: pages follow each other after {stride} bytes, and hold "
            f"{region.page_stride_bytes}",
            layer=cache.name,
        )
    scratch = pages.scratch
    if page_tokens is None and stride > region.page_stride_bytes:
        padding = stride - region.page_stride_bytes
        scratch += (Scratch(region.name, DType.UINT8, region.page_stride_bytes, (padding,), (1,)),)
    region = replace(
        region,
        group=group_name(cache.group),
        page_stride_bytes=stride,
        page_tokens=page_tokens,
        pages_per_block=cache.pages_per_block,
        null_block=NULL_BLOCK,
    )
    device = cache.tensor.device
    memory = RegionMemory(
        region.name,
        cache.tensor.data_ptr(),
        cache.tensor.shape[0],
        stride,
        MemoryKind.CUDA if device.type == "cuda" else MemoryKind.HOST,
        device.index or 0,
    )
    _check_end(cache, memory)
    return Pages((region,), pages.shards, scratch), memory


def _settings(
    shape: RankShape, page_tokens: int = 1, order: KvOrder = KvOrder.HND
) -> EngineSettings:
    return EngineSettings(
        tp=shape.tp,
        page_tokens=page_tokens,
        conv_layout=shape.conv_layout,
        kv_order=order,
        conv_rows_extra=shape.conv_rows_extra,
    )


def _check_tokens(pages: Pages, page_bytes: int, cache: LayerCache) -> None:
    """Refuse a tensor whose shape, type or strides are not those of the shards."""
    tensor, first = cache.tensor, pages.shards[0]
    item = tensor.element_size()
    if tensor.dim() != 4 or tensor.stride(3) != 1:
        raise _unlike(cache, "a shape of [pages, heads, tokens, content]", tuple(tensor.shape))
    held_bytes = math.prod(tensor.shape[1:]) * item
    if held_bytes != page_bytes:
        raise _unlike(cache, f"{page_bytes} bytes a page", held_bytes)
    if (
        all(shard.dtype.castable for shard in pages.shards)
        and dtype_of(tensor.dtype) != first.dtype
    ):
        raise _unlike(cache, first.dtype.label, tensor.dtype)
    token_stride = item if cache.kv_order is KvOrder.HDN else tensor.stride(2) * item
    if first.token_stride_bytes != token_stride and tensor.shape[2] > 1:
        raise _unlike(cache, f"tokens {first.token_stride_bytes} bytes apart", tensor.stride())
    heads = first.box[0].size if len(first.box) > 1 else 1
    if heads != tensor.shape[1]:
        raise _unlike(cache, f"{heads} heads", tensor.shape[1])
    if heads > 1 and first.strides_bytes[0] != tensor.stride(1) * item:
        raise _unlike(cache, f"heads {first.strides_bytes[0]} bytes apart", tensor.stride())


def _check_state(spec: RecurrentSpec, shape: RankShape, cache: LayerCache) -> None:
    """Refuse states that are not those of the family, in its order and as large as it says."""
    form = spec.recurrence()
    expected: list[tuple[int, ...]] = []
    dtypes: list[DType] = []
    if form.conv:
        boxes = [part.box(shape.tp, shape.tp_rank) for part in form.conv]
        columns = sum(math.prod(span.size for span in box) for box in boxes)
        rows = form.taps + (shape.conv_rows_extra if form.speculates else 0)
        window = (rows, columns) if shape.conv_layout is ConvLayout.SD else (columns, rows)
        expected.append(window)
        dtypes.append(form.conv_dtype)
    for part in form.states:
        expected.append(tuple(span.size for span in part.box(shape.tp, shape.tp_rank)))
        dtypes.append(form.state_dtype)
    if list(cache.state_shapes) != expected:
        raise _unlike(cache, f"states of {expected}", list(cache.state_shapes))
    found = [dtype_of(dtype) for dtype in cache.state_dtypes]
    if found != dtypes:
        wanted = ", ".join(dtype.label for dtype in dtypes)
        raise _unlike(cache, wanted, ", ".join(dtype.label for dtype in found))


def _check_end(cache: LayerCache, memory: RegionMemory) -> None:
    """Refuse a last page outside of the allocation: registering it would fail or worse."""
    storage = cache.tensor.untyped_storage()
    if memory.base_address + memory.length_bytes > storage.data_ptr() + storage.nbytes():
        raise CacheUnknownError(
            f"{cache.name}: its last page reaches out of the allocation: layouts whose blocks hold "
            "the pages of several layers (BLHNC and the like) are not known; leave "
            "VLLM_KV_CACHE_LAYOUT to the connector",
            layer=cache.name,
        )


def _unlike(cache: LayerCache, wanted: object, found: object) -> CacheUnknownError:
    return CacheUnknownError(
        f"{cache.name}: the model's config and parallelism say {wanted}; vLLM's cache has {found}",
        layer=cache.name,
    )
