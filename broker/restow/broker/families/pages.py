"""The pages of one layer on one rank, as vLLM packs them."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

from restow.broker.errors import LayoutFormError
from restow.broker.families.cut import rank_span
from restow.broker.families.rebuilding import input_shards, weights
from restow.broker.families.recurrent import RecurrentSpec
from restow.broker.families.scales import SCALE_DTYPE
from restow.broker.families.settings import ConvLayout, EngineSettings, KvOrder
from restow.broker.families.specs import AttentionSpec, BlockScaledMlaSpec, LayerSpec, MlaSpec
from restow.broker.layout import Box, Projection, Region, Scratch, Shard, Span

ATTENTION_GROUP = "attention"
STATE_GROUP = "state"


@dataclass(frozen=True, slots=True)
class Pages:
    """The regions of a layer, and what lies in a page of each."""

    regions: tuple[Region, ...]
    shards: tuple[Shard, ...]
    scratch: tuple[Scratch, ...] = ()
    inputs: tuple[Shard, ...] = ()
    projections: tuple[Projection, ...] = ()


def layer_pages(layer: LayerSpec, settings: EngineSettings, tp_rank: int) -> Pages:
    """What a rank of a layer's stage holds of it. Raises `TpSizeError`."""
    if isinstance(layer, AttentionSpec):
        return _attention(layer, settings, tp_rank)
    if isinstance(layer, MlaSpec | BlockScaledMlaSpec):
        return _latent(layer, settings)
    return _recurrent(layer, settings, tp_rank)


def _attention(layer: AttentionSpec, settings: EngineSettings, tp_rank: int) -> Pages:
    """``[head][token]`` (HND) or ``[token][head]``, each with K and V side by side or apart.

    A scale of a token and head lies behind its elements: ``[K | k_scale | V | v_scale]``, each
    float32 (vLLM `v1/attention/backends/triton_attn.py`, `_ensure_scale_caches`).
    """
    heads = rank_span(layer.kv_heads, settings.tp, tp_rank, "head")
    item = layer.dtype.itemsize_bytes
    data_bytes = layer.head_dim * item
    part_bytes = data_bytes + (SCALE_DTYPE.itemsize_bytes if layer.scales.per_token else 0)
    row_bytes = part_bytes * (2 if settings.kv_packed else 1)
    if settings.kv_order is KvOrder.HDN:
        return _transposed_keys(layer, settings, heads)
    if settings.kv_order is KvOrder.HND:
        token_stride, head_stride = row_bytes, settings.page_tokens * row_bytes
    else:
        token_stride, head_stride = heads.size * row_bytes, row_bytes
    page_bytes = settings.page_tokens * heads.size * row_bytes
    prefix = f"layers.{layer.layer}"
    names = ("kv",) if settings.kv_packed else ("k", "v")
    group = _group(layer)
    regions = tuple(
        _token_region(f"{prefix}.{name}", group, page_bytes, settings) for name in names
    )
    shards: list[Shard] = []
    for index, part in enumerate(("k", "v")):
        data = Shard(
            field=f"{prefix}.{part}",
            box=(heads, Span(0, layer.head_dim)),
            dtype=layer.dtype,
            region=regions[index % len(regions)].name,
            offset_bytes=index * part_bytes if settings.kv_packed else 0,
            strides_bytes=(head_stride, item),
            token_stride_bytes=token_stride,
        )
        shards.append(data)
        if layer.scales.per_token:
            scale = replace(
                data,
                field=f"{data.field}_scale",
                box=(heads,),
                dtype=SCALE_DTYPE,
                offset_bytes=data.offset_bytes + data_bytes,
                strides_bytes=(head_stride,),
            )
            shards.append(scale)
    return Pages(regions, tuple(shards))


def _transposed_keys(layer: AttentionSpec, settings: EngineSettings, heads: Span) -> Pages:
    """Of each head its keys as ``[dim][token]``, then its values as ``[token][dim]``."""
    if layer.scales.per_token:
        raise LayoutFormError("kv_order HDN: no engine keeps scales per token and head beside it")
    item, tokens = layer.dtype.itemsize_bytes, settings.page_tokens
    part_bytes = tokens * layer.head_dim * item
    parts = 2 if settings.kv_packed else 1
    prefix = f"layers.{layer.layer}"
    names = ("kv",) if settings.kv_packed else ("k", "v")
    regions = tuple(
        _token_region(f"{prefix}.{name}", _group(layer), heads.size * parts * part_bytes, settings)
        for name in names
    )
    shards = tuple(
        Shard(
            field=f"{prefix}.{part}",
            box=(heads, Span(0, layer.head_dim)),
            dtype=layer.dtype,
            region=regions[index % len(regions)].name,
            offset_bytes=index * part_bytes if settings.kv_packed else 0,
            strides_bytes=(parts * part_bytes, dim_stride),
            token_stride_bytes=token_stride,
        )
        for index, (part, dim_stride, token_stride) in enumerate(
            (("k", tokens * item, item), ("v", item, layer.head_dim * item))
        )
    )
    return Pages(regions, shards)


def _group(layer: AttentionSpec) -> str:
    """Engines free the pages that a window has left behind: its lists are not those of others."""
    return f"window.{layer.window_tokens}" if layer.window_tokens else ATTENTION_GROUP


def _latent(layer: MlaSpec | BlockScaledMlaSpec, settings: EngineSettings) -> Pages:
    """``[token][part]``, the same on every rank: mostly there is one part."""
    parts = layer.parts()
    ends = list(
        itertools.accumulate(field.shape[0] * dtype.itemsize_bytes for field, dtype in parts)
    )
    name = f"layers.{layer.layer}.latent"
    page_bytes = settings.page_tokens * ends[-1]
    region = _token_region(name, ATTENTION_GROUP, page_bytes, settings)
    shards = tuple(
        Shard(
            field=field.name,
            box=(Span(0, field.shape[0]),),
            dtype=dtype,
            region=name,
            offset_bytes=start,
            strides_bytes=(dtype.itemsize_bytes,),
            token_stride_bytes=ends[-1],
        )
        for (field, dtype), start in zip(parts, (0, *ends[:-1]), strict=True)
    )
    return Pages((region,), shards)


def _token_region(name: str, group: str, page_bytes: int, settings: EngineSettings) -> Region:
    return Region(
        name,
        group,
        _aligned(page_bytes, settings.page_align_bytes),
        settings.page_tokens,
        settings.pages_per_block,
        settings.null_block,
    )


def _recurrent(layer: RecurrentSpec, settings: EngineSettings, tp_rank: int) -> Pages:
    """The conv windows, their channels in the order of the parts, then the states, then padding.

    A window's rows for speculative tokens follow its live ones.
    """
    form = layer.recurrence()
    prefix = f"layers.{layer.layer}"
    name = f"{prefix}.{form.kind}"
    windows = [(part, part.box(settings.tp, tp_rank)) for part in form.conv]
    columns = sum(_size(box) for _, box in windows)
    rows = form.taps + (settings.conv_rows_extra if form.speculates else 0)
    item = form.conv_dtype.itemsize_bytes
    if settings.conv_layout is ConvLayout.SD:
        channel_stride, tap_stride = item, columns * item
    else:
        channel_stride, tap_stride = rows * item, item
    shards: list[Shard] = []
    first = 0
    for part, box in windows:
        shards.append(
            Shard(
                field=f"{prefix}.{part.name}",
                box=(*box, Span(0, form.taps)),
                dtype=form.conv_dtype,
                region=name,
                offset_bytes=first * channel_stride,
                strides_bytes=(*_strides(box, channel_stride), tap_stride),
            )
        )
        first += _size(box)
    extra = rows - form.taps
    scratch = Scratch(
        name,
        form.conv_dtype,
        form.taps * tap_stride,
        (columns, extra),
        (channel_stride, tap_stride),
    )
    end = columns * rows * item
    for part in form.states:
        box = part.box(settings.tp, tp_rank)
        shards.append(
            Shard(
                field=f"{prefix}.{part.name}",
                box=box,
                dtype=form.state_dtype,
                region=name,
                offset_bytes=end,
                strides_bytes=_strides(box, form.state_dtype.itemsize_bytes),
            )
        )
        end += _size(box) * form.state_dtype.itemsize_bytes
    inputs, end = input_shards(layer, settings, name, end)
    constant, projections = weights(layer, settings, tp_rank)
    page_bytes = _aligned(end, settings.page_align_bytes)
    region = Region(name, STATE_GROUP, page_bytes, None, null_block=settings.null_block)
    kept = (scratch,) if extra and columns else ()
    return Pages((region, *constant), tuple(shards), kept, inputs, projections)


def _size(box: Box) -> int:
    return math.prod(span.size for span in box)


def _strides(box: Box, innermost_bytes: int) -> tuple[int, ...]:
    """Of a box that lies there whole, the last axis innermost."""
    return tuple(_size(box[axis + 1 :]) * innermost_bytes for axis in range(len(box)))


def _aligned(size_bytes: int, align_bytes: int) -> int:
    return -(-size_bytes // align_bytes) * align_bytes
