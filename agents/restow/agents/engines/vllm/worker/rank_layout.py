"""Make a rank's layout from vLLM's caches, and check it against the model's config.

`LayerNumbers` and `DraftLayers` find the layer that a cache belongs to. The family knows what lies
where in a page, and the tensors where the pages are. Both must agree before anything is served: a
wrong layout would silently move wrong bytes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from restow.agents.engines.common.adapter_errors import CacheUnknownError
from restow.agents.engines.common.blocks import NULL_BLOCK
from restow.agents.memory.regions import MemoryKind, RegionMemory
from restow.broker.families import (
    ConvLayout,
    EngineSettings,
    IndexerSpec,
    KvOrder,
    LayerSpec,
    ModelSpec,
    RecurrentSpec,
)
from restow.broker.families.build import LayerPages, layer_pages
from restow.broker.layout import DType, RankLayout, Scratch
from restow.broker.words import Worded

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True, slots=True)
class LayerNumbers:
    """Maps the numbers in the names of caches to layers; nearly always they are equal.

    vLLM gives every cache a number of its own, so where one layer has two caches the numbers are
    not those of layers. Mixers are numbered from ``first_state`` on, and ``attention`` maps the
    numbers of attention caches to layers.
    """

    first_state: int
    attention: Mapping[int, int]

    @classmethod
    def of(cls, hf_config: Mapping[str, Any]) -> LayerNumbers:
        """Return the numbers that vLLM 0.32 gives a model (`falcon_h1.py`, `zamba2.py`)."""
        model_type = hf_config.get("model_type")
        if model_type == "falcon_h1":
            return cls(hf_config["num_hidden_layers"], {})
        if model_type == "zamba2":
            kinds = hf_config["layers_block_type"]
            hybrid = [layer for layer, kind in enumerate(kinds) if kind == "hybrid"]
            return cls(len(hybrid), _of_shared_blocks(hybrid, hf_config["num_mem_blocks"]))
        return cls(0, {})

    def layer(self, number: int, is_state: bool) -> int:
        """Return the layer that the cache with this number in its name belongs to."""
        return number - self.first_state if is_state else self.attention.get(number, number)


def _of_shared_blocks(hybrid: list[int], blocks: int) -> dict[int, int]:
    """Return layers by number, where the ``hybrid`` layers take turns with ``blocks`` of weights.

    vLLM numbers all uses of the first block, then those of the next, each beginning at a fixed
    number: with 3 blocks and 7 layers at 0, 3 and 6.
    """
    count = len(hybrid)
    return {
        block * (count + blocks - 1) // blocks + use: layer
        for block in range(blocks)
        for use, layer in enumerate(hybrid[block::blocks])
    }


@dataclass(frozen=True, slots=True)
class DraftLayers:
    """Tells the caches of a draft model (MTP, EAGLE) from those of the model.

    A draft's layers get numbers from ``first`` on, behind the model's; None: there is no draft.
    vLLM 0.32 itself numbers some drafts' layers so (`deepseek_mtp.py`, `llama_eagle.py`), and
    others from 0 on under names of their own (`qwen3_next_mtp.py`, `spec_decode/draft_model.py`).
    """

    first: int | None = None

    @classmethod
    def of(cls, config: VllmConfig) -> DraftLayers:
        """Return the draft layers of an engine. Drafting by n-grams has no layers."""
        drafting = config.speculative_config is not None
        return cls(config.model_config.get_total_num_hidden_layers() if drafting else None)

    def layer(self, name: str, number: int, layer: int) -> int | None:
        """Return the draft's layer that a cache belongs to; None: it is the model's own.

        ``number`` is the number in the cache's ``name``, and ``layer`` the model's layer for it.
        """
        if self.first is None:
            return None
        parts = name.split(".")
        if parts[0] == "draft_model" or "mtp" in parts:
            return number if number >= self.first else self.first + number
        return layer if layer >= self.first else None


@dataclass(frozen=True, slots=True, eq=False)
class LayerCache(Worded):
    """A layer's cache as vLLM registered it.

    Attention: ``tensor`` is ``[pages, heads, tokens, content]``; a block has ``pages_per_block``
    pages. Recurrent: it is ``[blocks, 1, 1, bytes]``; states of ``state_shapes`` follow each other.
    An indexer's pages have one part of all tokens after the other, with ``parts_bytes`` of each.
    """

    name: str
    layer: int
    group: str
    tensor: torch.Tensor
    pages_per_block: int = 1
    kv_order: KvOrder = KvOrder.HND
    state_shapes: tuple[tuple[int, ...], ...] = ()
    state_dtypes: tuple[torch.dtype, ...] = ()
    parts_bytes: tuple[int, ...] = ()

    @property
    def is_state(self) -> bool:
        """Whether a page holds snapshots."""
        return bool(self.state_shapes)

    @property
    def kind(self) -> tuple[bool, bool]:
        """Whether it holds snapshots, and whether it is an indexer's: a layer may have both."""
        return self.is_state, bool(self.parts_bytes)

    def by_token(self) -> tuple[torch.Tensor, ...]:
        """Return views ``[pages, heads, tokens, ...]`` that cover the cache."""
        tensor = self.tensor
        if self.parts_bytes:
            pages, heads, tokens, _ = tensor.shape
            starts = itertools.accumulate(self.parts_bytes, initial=0)
            return tuple(
                tensor.as_strided(
                    (pages, heads, tokens, size),
                    (*tensor.stride()[:2], size, 1),
                    tensor.storage_offset() + tokens * start,
                )
                for start, size in zip(starts, self.parts_bytes, strict=False)
            )
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
    """The layout of a rank, and the memory of its regions in the same order."""

    layout: RankLayout
    memory: tuple[RegionMemory, ...]


def rank_layout(
    model: ModelSpec, settings: EngineSettings, rank: int, caches: Sequence[LayerCache]
) -> RankRegions:
    """Return the rank's layout. Raises `CacheUnknownError` where a cache differs from the model.

    The page size and order of ``settings`` are not used, since every cache has its own.
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
    """Return the model's layer that a cache belongs to. Raises `CacheUnknownError`."""
    for spec in (*model.layers, *model.draft_layers):
        if spec.layer == cache.layer and kind_of(spec) == cache.kind:
            return spec
    kind = "recurrent state" if cache.is_state else "keys and values"
    raise CacheUnknownError(
        f"layer {cache.layer} ({cache.name}) keeps {kind}, which the config of model "
        f"{model.name!r} does not have",
        layer=cache.name,
    )


def kind_of(spec: LayerSpec) -> tuple[bool, bool]:
    """Return the `LayerCache.kind` of the layer's cache."""
    return isinstance(spec, RecurrentSpec), isinstance(spec, IndexerSpec)


def dtype_of(tensor_dtype: torch.dtype) -> DType:
    """Return the layout's name of a torch dtype. Raises `LayoutFormError`."""
    return DType.parse(str(tensor_dtype).removeprefix("torch."))


# -- inside ---------------------------------------------------------------------------------------


def _laid(
    spec: LayerSpec, settings: EngineSettings, tp_rank: int, cache: LayerCache
) -> tuple[LayerPages, RegionMemory]:
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
    return LayerPages((region,), pages.shards, scratch), memory


def _check_tokens(pages: LayerPages, page_bytes: int, cache: LayerCache) -> None:
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
    wanted_stride = sum(cache.parts_bytes) or first.token_stride_bytes
    if wanted_stride != token_stride and tensor.shape[2] > 1:
        raise _unlike(cache, f"tokens {wanted_stride} bytes apart", tensor.stride())
    heads = first.box[0].size if len(first.box) > 1 else 1
    if heads != tensor.shape[1]:
        raise _unlike(cache, f"{heads} heads", tensor.shape[1])
    if heads > 1 and first.strides_bytes[0] != tensor.stride(1) * item:
        raise _unlike(cache, f"heads {first.strides_bytes[0]} bytes apart", tensor.stride())


def _check_state(
    spec: RecurrentSpec, settings: EngineSettings, tp_rank: int, cache: LayerCache
) -> None:
    """Refuse states whose order, shapes or types are not those of the family."""
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
    cache_dtypes = [dtype_of(dtype) for dtype in cache.state_dtypes]
    if cache_dtypes != dtypes:
        wanted = ", ".join(dtype.label for dtype in dtypes)
        raise _unlike(cache, wanted, ", ".join(dtype.label for dtype in cache_dtypes))


def _check_end(cache: LayerCache, memory: RegionMemory) -> None:
    """Refuse a last page that reaches out of the allocation, and so cannot be registered."""
    storage = cache.tensor.untyped_storage()
    if memory.base_address + memory.length_bytes > storage.data_ptr() + storage.nbytes():
        raise CacheUnknownError(
            f"{cache.name}: its last page reaches out of the allocation: layouts whose blocks hold "
            "the pages of several layers (such as BLHNC) are not supported; leave "
            "VLLM_KV_CACHE_LAYOUT to the connector",
            layer=cache.name,
        )


def _unlike(cache: LayerCache, wanted: object, found: object) -> CacheUnknownError:
    return CacheUnknownError(
        f"{cache.name}: the model's config and parallelism say {wanted}; vLLM's cache has {found}",
        layer=cache.name,
    )
