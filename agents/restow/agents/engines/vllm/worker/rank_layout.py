"""`rank_layout` makes a rank's layout from vLLM's caches, and checks it by the model's config.

The family says what must lie where in a page; the tensors say where the pages are. Both must agree,
or nothing is served: a layout that is only believed gives wrong bytes without a word.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from restow.agents.engines.common.groups import NULL_BLOCK
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
    group: str
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
class RankRegions:
    """Holds the layout of one rank, and the memory of its regions in the same order."""

    layout: RankLayout
    memory: tuple[RegionMemory, ...]


def rank_layout(
    model: ModelSpec, settings: EngineSettings, rank: int, caches: Sequence[LayerCache]
) -> RankRegions:
    """Return the rank's layout. Raises `CacheUnknownError` for what is not as the model says.

    Of ``settings`` tokens and order of a page are not looked at: every cache has its own.
    """
    laid = [_laid(layer_of(model, cache), settings, rank % settings.tp, cache) for cache in caches]
    layout = RankLayout(
        rank,
        tuple(region for pages, _ in laid for region in pages.regions),
        tuple(shard for pages, _ in laid for shard in pages.shards),
        tuple(scratch for pages, _ in laid for scratch in pages.scratch),
    )
    return RankRegions(layout, tuple(memory for _, memory in laid))


def layer_of(model: ModelSpec, cache: LayerCache) -> LayerSpec:
    """Return what the model has of the layer's cache. Raises `CacheUnknownError`."""
    for spec in (*model.layers, *model.draft_layers):
        if spec.layer == cache.layer and isinstance(spec, RecurrentSpec) == cache.is_state:
            return spec
    kind = "recurrent state" if cache.is_state else "keys and values"
    raise CacheUnknownError(
        f"layer {cache.layer} ({cache.name}) keeps {kind}, of which the config of model "
        f"{model.name!r} says nothing",
        layer=cache.name,
    )


def dtype_of(tensor_dtype: torch.dtype) -> DType:
    """Return the layout's name of a torch dtype. Raises `LayoutFormError`."""
    return DType.parse(str(tensor_dtype).removeprefix("torch."))


# -- inside ---------------------------------------------------------------------------------------


def _laid(
    spec: LayerSpec, settings: EngineSettings, tp_rank: int, cache: LayerCache
) -> tuple[Pages, RegionMemory]:
    page_tokens = None if cache.is_state else cache.tensor.shape[2]
    if page_tokens is not None:
        settings = replace(settings, page_tokens=page_tokens, kv_order=cache.kv_order)
    pages = layer_pages(spec, settings, tp_rank)
    (region,) = pages.regions
    if isinstance(spec, RecurrentSpec):
        _check_state(spec, settings, tp_rank, cache)
    else:
        _check_tokens(pages, region.page_stride_bytes, cache)
    stride = cache.tensor.stride(0) * cache.tensor.element_size()
    padding = stride - region.page_stride_bytes
    if padding < 0:
        raise CacheUnknownError(
            f"{cache.name}: pages follow each other after {stride} bytes, and hold "
            f"{region.page_stride_bytes}",
            layer=cache.name,
        )
    scratch = pages.scratch
    if cache.is_state and padding:
        scratch += (Scratch(region.name, DType.UINT8, region.page_stride_bytes, (padding,), (1,)),)
    region = replace(
        region,
        group=cache.group,
        page_stride_bytes=stride,
        page_tokens=page_tokens,
        pages_per_block=cache.pages_per_block,
        null_block=NULL_BLOCK,
        whole_blocks=settings.whole_blocks and not cache.is_state,
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


def _check_state(
    spec: RecurrentSpec, settings: EngineSettings, tp_rank: int, cache: LayerCache
) -> None:
    """Refuse states that are not those of the family, in its order and as large as it says."""
    form = spec.recurrence()
    expected: list[tuple[int, ...]] = []
    dtypes: list[DType] = []
    if form.conv:
        boxes = [part.box(settings.tp, tp_rank) for part in form.conv]
        columns = sum(math.prod(span.size for span in box) for box in boxes)
        rows = form.taps + (settings.conv_rows_extra if form.speculates else 0)
        window = (rows, columns) if settings.conv_layout is ConvLayout.SD else (columns, rows)
        expected.append(window)
        dtypes.append(form.conv_dtype)
    for part in form.states:
        expected.append(tuple(span.size for span in part.box(settings.tp, tp_rank)))
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
