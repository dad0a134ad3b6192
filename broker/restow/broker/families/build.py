"""Lay a model's state out for an engine, as vLLM packs it.

One region a layer and kind. An attention page is ``[head][token][K | V]`` (HND) or
``[token][head][K | V]``; a Mamba page is the conv state, columns in the order x, B, C, then the
SSM state, then padding (LAYOUT of vLLM 0.32, `MambaBase.bind_kv_cache`).
"""

from __future__ import annotations

from restow.broker.families.cut import rank_slice, rank_span
from restow.broker.families.settings import ConvLayout, EngineSettings, KvOrder
from restow.broker.families.specs import AttentionSpec, Mamba2Spec, ModelSpec
from restow.broker.layout import Layout, RankLayout, Region, Shard, Span

ATTENTION_GROUP = "attention"
STATE_GROUP = "state"


def build_layout(model: ModelSpec, settings: EngineSettings) -> Layout:
    """The layout of ``model`` on an engine with ``settings``.

    Raises `TpSizeError`, and `LayoutFormError` for settings outside of their bounds.
    """
    settings.check()
    ranks = tuple(_rank(model, settings, rank) for rank in range(settings.tp))
    return Layout(model.model(), ranks)


def _rank(model: ModelSpec, settings: EngineSettings, rank: int) -> RankLayout:
    regions: list[Region] = []
    shards: list[Shard] = []
    for layer in model.layers:
        if isinstance(layer, AttentionSpec):
            region, layer_shards = _attention(layer, settings, rank)
        else:
            region, layer_shards = _mamba2(layer, settings, rank)
        regions.append(region)
        shards.extend(layer_shards)
    return RankLayout(rank, tuple(regions), tuple(shards))


def _aligned(size_bytes: int, align_bytes: int) -> int:
    return -(-size_bytes // align_bytes) * align_bytes


def _attention(
    layer: AttentionSpec, settings: EngineSettings, rank: int
) -> tuple[Region, list[Shard]]:
    item = layer.dtype.itemsize_bytes
    heads = rank_span(layer.kv_heads, settings.tp, rank, "head")
    row_bytes = 2 * layer.head_dim * item
    if settings.kv_order is KvOrder.HND:
        token_stride, head_stride = row_bytes, settings.page_tokens * row_bytes
    else:
        token_stride, head_stride = heads.size * row_bytes, row_bytes
    name = f"layers.{layer.layer}.kv"
    page_bytes = settings.page_tokens * heads.size * row_bytes
    region = Region(
        name,
        ATTENTION_GROUP,
        _aligned(page_bytes, settings.page_align_bytes),
        settings.page_tokens,
        settings.pages_per_block,
    )
    shards = [
        Shard(
            field=f"layers.{layer.layer}.{part}",
            box=(heads, Span(0, layer.head_dim)),
            dtype=layer.dtype,
            region=name,
            offset_bytes=index * layer.head_dim * item,
            strides_bytes=(head_stride, item),
            token_stride_bytes=token_stride,
        )
        for index, part in enumerate(("k", "v"))
    ]
    return region, shards


def _mamba2(layer: Mamba2Spec, settings: EngineSettings, rank: int) -> tuple[Region, list[Shard]]:
    heads = rank_slice(layer.heads, settings.tp, rank, "Mamba head")
    groups = rank_span(layer.groups, settings.tp, rank, "group")
    channels = Span(heads.start * layer.head_dim, heads.stop * layer.head_dim)
    item = layer.conv_dtype.itemsize_bytes
    group_channels = groups.size * layer.state
    columns = channels.size + 2 * group_channels
    rows = layer.taps + settings.conv_rows_extra
    if settings.conv_layout is ConvLayout.SD:
        channel_stride, tap_stride = item, columns * item
    else:
        channel_stride, tap_stride = rows * item, item
    name = f"layers.{layer.layer}.mamba"
    taps = Span(0, layer.taps)
    states = Span(0, layer.state)
    shards = [
        Shard(
            field=f"layers.{layer.layer}.conv.x",
            box=(channels, taps),
            dtype=layer.conv_dtype,
            region=name,
            offset_bytes=0,
            strides_bytes=(channel_stride, tap_stride),
        )
    ]
    for index, part in enumerate(("B", "C")):
        first = channels.size + index * group_channels
        shards.append(
            Shard(
                field=f"layers.{layer.layer}.conv.{part}",
                box=(groups, states, taps),
                dtype=layer.conv_dtype,
                region=name,
                offset_bytes=first * channel_stride,
                strides_bytes=(layer.state * channel_stride, channel_stride, tap_stride),
            )
        )
    ssm_item = layer.ssm_dtype.itemsize_bytes
    ssm_offset = columns * rows * item
    shards.append(
        Shard(
            field=f"layers.{layer.layer}.ssm",
            box=(heads, Span(0, layer.head_dim), states),
            dtype=layer.ssm_dtype,
            region=name,
            offset_bytes=ssm_offset,
            strides_bytes=(
                layer.head_dim * layer.state * ssm_item,
                layer.state * ssm_item,
                ssm_item,
            ),
        )
    )
    page_bytes = ssm_offset + heads.size * layer.head_dim * layer.state * ssm_item
    region = Region(name, STATE_GROUP, _aligned(page_bytes, settings.page_align_bytes), None)
    return region, shards
