"""Lay a model's state out for an engine, as vLLM packs it.

`layer_pages` returns the pages of a layer on a rank, and `build_layout` the layout of all layers
and ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from math import lcm
from typing import TypeVar

from restow.broker.errors import LayoutFormError, StageError, TpSizeError
from restow.broker.families.recurrent import MATRICES, RecurrentSpec, StatePart, input_name
from restow.broker.families.settings import (
    ConvLayout,
    EngineSettings,
    KvOrder,
    MatrixOrder,
    rank_span,
)
from restow.broker.families.specs import (
    BLOCK_DIM,
    PACKED,
    SCALE_DTYPE,
    SIXTEENTH_DTYPE,
    AttentionSpec,
    IndexerSpec,
    LatentSpec,
    LayerSpec,
    ModelSpec,
)
from restow.broker.layout import (
    Box,
    DType,
    Layout,
    Projection,
    RankLayout,
    Region,
    Scratch,
    Shard,
    Span,
)
from restow.broker.layout.span import aligned, packed_strides, volume

ATTENTION_GROUP = "attention"
STATE_GROUP = "state"


@dataclass(frozen=True, slots=True)
class LayerPages:
    """The regions of a layer, and the contents of a page of each region."""

    regions: tuple[Region, ...]
    shards: tuple[Shard, ...]
    scratch: tuple[Scratch, ...] = ()
    inputs: tuple[Shard, ...] = ()
    projections: tuple[Projection, ...] = ()


def layer_pages(layer: LayerSpec, settings: EngineSettings, stage_rank: int) -> LayerPages:
    """Return the pages of a layer on a rank. Raises `TpSizeError` and `LayoutFormError`."""
    check_context(layer, settings)
    tp_rank = stage_rank % settings.tp
    if isinstance(layer, AttentionSpec):
        made = _packed if layer.packed else _attention
        pages = made(layer, settings, tp_rank)
    elif isinstance(layer, LatentSpec | IndexerSpec):
        pages = _parts(layer, settings)
    else:
        return _recurrent(layer, settings, tp_rank)
    if settings.dcp == 1:
        return pages
    return replace(pages, regions=with_tokens(pages.regions, settings, stage_rank))


def _attention(layer: AttentionSpec, settings: EngineSettings, tp_rank: int) -> LayerPages:
    """Return keys and values of the rank's heads, side by side or in regions of their own.

    They are ``[head][token]`` (HND) or ``[token][head]`` (NHD); with HDN each head has its keys as
    ``[dim][token]``, then its values as ``[token][dim]``. The scale of a token and head follows its
    elements: ``[K | k_scale | V | v_scale]``, each float32 (vLLM
    `v1/attention/backends/triton_attn.py`, `_ensure_scale_caches`).
    """
    heads = rank_span(layer.kv_heads, settings.tp, tp_rank, "head")
    order, tokens, item = settings.kv_order, settings.page_tokens, layer.dtype.itemsize_bytes
    if order is KvOrder.HDN and layer.scales.per_token:
        raise LayoutFormError("kv_order HDN: no engine keeps scales per token and head beside it")
    scale_bytes = SCALE_DTYPE.itemsize_bytes if layer.scales.per_token else 0
    # Bytes of keys and of values for a head and token, and in the region of either.
    parts = {name: dim * item + scale_bytes for name, dim in layer.dims.items()}
    both = sum(parts.values())
    rows = {name: both if settings.kv_packed else size for name, size in parts.items()}
    prefix, group = f"layers.{layer.layer}", _group(layer)
    names = {"kv": both} if settings.kv_packed else parts
    regions = {
        name: _token_region(f"{prefix}.{name}", group, tokens * heads.size * row, settings)
        for name, row in names.items()
    }
    shards: list[Shard] = []
    for name, dim in layer.dims.items():
        row_bytes = rows[name]
        # Bytes from a head, from one of its elements and from a token to the next.
        head_stride, dim_stride, token_stride = tokens * row_bytes, item, row_bytes
        before_bytes = parts["k"] if name == "v" and settings.kv_packed else 0
        if order is KvOrder.NHD:
            head_stride, token_stride = row_bytes, heads.size * row_bytes
        elif order is KvOrder.HDN:
            dim_stride, token_stride = (tokens * item, item) if name == "k" else (item, parts["v"])
            before_bytes *= tokens
        data = Shard(
            field=f"{prefix}.{name}",
            box=(heads, Span(0, dim)),
            dtype=layer.dtype,
            region=regions["kv" if settings.kv_packed else name].name,
            offset_bytes=before_bytes,
            strides_bytes=(head_stride, dim_stride),
            token_stride_bytes=token_stride,
        )
        shards.append(data)
        if layer.scales.per_token:
            scale = replace(
                data,
                field=f"{data.field}_scale",
                box=(heads,),
                dtype=SCALE_DTYPE,
                offset_bytes=data.offset_bytes + dim * item,
                strides_bytes=(head_stride,),
            )
            shards.append(scale)
    return LayerPages(tuple(regions.values()), tuple(shards))


def _packed(layer: AttentionSpec, settings: EngineSettings, tp_rank: int) -> LayerPages:
    """Return float4 pages: ``[K | k_scale | V | v_scale]``, each part for all heads and tokens.

    This is the layout of vLLM's `_nvfp4_kv_views` and `nvfp4_split_data_scale`, except on GPUs of
    compute capability 10, where scales are interleaved over four tokens, which strides can't say.
    """
    heads, tokens = rank_span(layer.kv_heads, settings.tp, tp_rank, "head"), settings.page_tokens
    if settings.kv_order is KvOrder.HDN or not settings.kv_packed:
        raise LayoutFormError(
            f"kv_order {settings.kv_order}, kv_packed {settings.kv_packed}: {PACKED.label} lies in "
            f"pages of keys and values, with heads or tokens first (HND, NHD)"
        )
    prefix, name = f"layers.{layer.layer}", f"layers.{layer.layer}.kv"
    shards: list[Shard] = []
    end = 0
    for part, dim in layer.dims.items():
        for suffix, row, dtype in (
            ("", dim // 2, PACKED),
            ("_scale", dim // BLOCK_DIM, SIXTEENTH_DTYPE),
        ):
            by_head = settings.kv_order is KvOrder.HND
            head_stride, token_stride = (tokens * row, row) if by_head else (row, heads.size * row)
            shards.append(
                Shard(
                    field=f"{prefix}.{part}{suffix}",
                    box=(heads, Span(0, row)),
                    dtype=dtype,
                    region=name,
                    offset_bytes=end,
                    strides_bytes=(head_stride, 1),
                    token_stride_bytes=token_stride,
                )
            )
            end += heads.size * tokens * row
    return LayerPages((_token_region(name, _group(layer), end, settings),), tuple(shards))


def _group(layer: AttentionSpec) -> str:
    """Return the layer's group: engines free pages behind a window, so windows have own lists."""
    return f"window.{layer.window_tokens}" if layer.window_tokens else ATTENTION_GROUP


def _parts(layer: LatentSpec | IndexerSpec, settings: EngineSettings) -> LayerPages:
    """Return pages that are the same on every rank: latents, or an indexer's keys.

    The parts of a latent lie side by side, token by token. An indexer has the first part of all
    tokens, then the next part of all tokens.
    """
    tokens, parts = settings.page_tokens, layer.parts()
    ends = list(
        itertools.accumulate(field.shape[0] * dtype.itemsize_bytes for field, dtype in parts)
    )
    row_bytes, by_part = ends[-1], isinstance(layer, IndexerSpec)
    name = parts[0][0].name
    if isinstance(layer, IndexerSpec) and layer.page_tokens not in (0, tokens):
        raise LayoutFormError(
            f"{name}: an indexer's pages have {layer.page_tokens} tokens, not {tokens}: its scales "
            f"lie behind the elements of that many tokens (page_tokens {layer.page_tokens}, and "
            f"pages_per_block for larger blocks)"
        )
    region = _token_region(name, ATTENTION_GROUP, tokens * row_bytes, settings)
    shards = tuple(
        Shard(
            field=field.name,
            box=(Span(0, field.shape[0]),),
            dtype=dtype,
            region=name,
            offset_bytes=start * tokens if by_part else start,
            strides_bytes=(dtype.itemsize_bytes,),
            token_stride_bytes=end - start if by_part else row_bytes,
        )
        for (field, dtype), start, end in zip(parts, (0, *ends[:-1]), ends, strict=True)
    )
    return LayerPages((region,), shards)


def _token_region(name: str, group: str, page_bytes: int, settings: EngineSettings) -> Region:
    return Region(
        name,
        group,
        aligned(page_bytes, settings.page_align_bytes),
        settings.page_tokens,
        settings.pages_per_block,
        settings.null_block,
        whole_blocks=settings.whole_blocks,
    )


def _recurrent(layer: RecurrentSpec, settings: EngineSettings, tp_rank: int) -> LayerPages:
    """Return a page of conv windows, with channels in the order of the parts, then the states.

    A window's rows for speculative tokens follow its live rows; padding follows the states.
    """
    form = layer.recurrence()
    prefix = f"layers.{layer.layer}"
    name = f"{prefix}.{form.kind}"
    windows = [(part, part.box(settings.tp, tp_rank)) for part in form.conv]
    columns = sum(volume(box) for _, box in windows)
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
                strides_bytes=(*packed_strides(box, channel_stride), tap_stride),
            )
        )
        first += volume(box)
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
                strides_bytes=_state_strides(part, box, form.state_dtype, settings),
            )
        )
        end += volume(box) * form.state_dtype.itemsize_bytes
    inputs, end = input_shards(layer, settings, name, end)
    constant, projections = weights(layer, settings, tp_rank)
    page_bytes = aligned(end, state_align_bytes(settings))
    region = Region(name, STATE_GROUP, page_bytes, None, null_block=settings.null_block)
    kept = (scratch,) if extra and columns else ()
    return LayerPages((region, *constant), tuple(shards), kept, inputs, projections)


def _state_strides(
    part: StatePart, box: Box, dtype: DType, settings: EngineSettings
) -> tuple[int, ...]:
    """Return the strides of a state without gaps, with matrices in the engine's order."""
    strides = packed_strides(box, dtype.itemsize_bytes)
    if part.axes != MATRICES or settings.matrix_order is MatrixOrder.VK:
        return strides
    head, _, item = strides
    return head, item, item * box[1].size


def check_context(layer: LayerSpec, settings: EngineSettings) -> None:
    """Refuse layers for which vLLM has no context parallelism.

    These are the rules of `KVCacheCoordinator` and `ModelConfig`. Raises `LayoutFormError` and
    `TpSizeError`.
    """
    window = isinstance(layer, AttentionSpec) and layer.window_tokens
    if settings.pcp > 1 and (window or isinstance(layer, RecurrentSpec)):
        raise LayoutFormError(
            f"pcp is {settings.pcp}: prefill context parallelism is for attention to all tokens, "
            f"and layer {layer.layer} has a {'window' if window else 'recurrent state'}"
        )
    if settings.dcp == 1 or isinstance(layer, RecurrentSpec):
        return
    if window:
        raise LayoutFormError(
            f"dcp is {settings.dcp}: layer {layer.layer} has a window, whose tokens no engine "
            f"shares out"
        )
    if isinstance(layer, AttentionSpec) and settings.dcp > settings.tp // layer.kv_heads:
        raise TpSizeError(
            f"dcp is {settings.dcp}: ranks share out the tokens of a head that they would all "
            f"hold, and of {layer.kv_heads} heads over TP {settings.tp} each is on "
            f"{settings.tp // layer.kv_heads or 1}",
            axis="token",
            ranks=settings.tp,
        )


def with_tokens(
    regions: Sequence[Region], settings: EngineSettings, stage_rank: int
) -> tuple[Region, ...]:
    """Return the regions of keys and values with the part of the tokens that the rank keeps."""
    return tuple(
        replace(
            region,
            context_parts=settings.dcp,
            context_part=settings.context_part(stage_rank),
            interleave_tokens=settings.interleave_tokens,
        )
        for region in regions
    )


INPUT_ALIGN_BYTES = 16


def input_shards(
    layer: RecurrentSpec, settings: EngineSettings, region: str, end: int
) -> tuple[tuple[Shard, ...], int]:
    """Return the layer's inputs, which follow the states that end at ``end``, and the inputs' end.

    Every rank keeps the inputs whole, because every rank reads them.
    """
    form = layer.recurrence()
    mixer = form.read
    if not settings.mixer_inputs or mixer is None:
        return (), end
    start = aligned(end, INPUT_ALIGN_BYTES)
    item = mixer.dtype.itemsize_bytes
    box = (Span(0, form.taps), Span(0, mixer.hidden))
    strides = (mixer.hidden * item, item)
    shard = Shard(input_name(layer.layer), box, mixer.dtype, region, start, strides)
    return (shard,), start + form.taps * strides[0]


def state_align_bytes(settings: EngineSettings) -> int:
    """Return the alignment of state pages, so that the next page's inputs are aligned too."""
    if not settings.mixer_inputs:
        return settings.page_align_bytes
    return lcm(settings.page_align_bytes, INPUT_ALIGN_BYTES)


def weights(
    layer: RecurrentSpec, settings: EngineSettings, tp_rank: int
) -> tuple[tuple[Region, ...], tuple[Projection, ...]]:
    """Return the rows of the in-projection that make a rank's windows: ``[x | B | C][hidden]``.

    The rows have the order of vLLM's weights, where other rows lie before and behind them.
    """
    form = layer.recurrence()
    mixer = form.read
    if not settings.projections or mixer is None:
        return (), ()
    name = f"layers.{layer.layer}.in_proj"
    item = mixer.dtype.itemsize_bytes
    row_bytes = mixer.hidden * item
    offered, end = [], 0
    for part in form.conv:
        box = part.box(settings.tp, tp_rank)
        offered.append(
            Projection(
                f"layers.{layer.layer}.{part.name}",
                (*box, Span(0, form.taps)),
                input_name(layer.layer),
                mixer.dtype,
                name,
                end,
                (*packed_strides(box, row_bytes), item),
            )
        )
        end += volume(box) * row_bytes
    return (Region(name, "", end, None),), tuple(offered)


Placed = TypeVar("Placed", Shard, Scratch)


def build_layout(model: ModelSpec, settings: EngineSettings) -> Layout:
    """Return the layout of ``model`` on an engine with ``settings``.

    Rank ``(stage * pcp + c) * tp + r`` is tensor-parallel rank ``r`` of prefill-context rank ``c``
    of a pipeline stage, and holds the state of the stage's layers. Raises `TpSizeError`,
    `StageError`, and `LayoutFormError` for settings that are out of bounds or that the model does
    not allow.
    """
    settings.check()
    model.check_rebuilding(settings.mixer_inputs or settings.projections)
    model.check_drafts()
    stages = stage_layers(model.depth, settings.pp, settings.layers_per_stage)
    ranks = tuple(
        _rank(model, settings, layers, index * settings.stage_ranks + rank, rank)
        for index, layers in enumerate(stages)
        for rank in range(settings.stage_ranks)
    )
    return Layout(model.model(settings.mixer_inputs or settings.projections), ranks)


def _rank(
    model: ModelSpec, settings: EngineSettings, layers: Span, rank: int, stage_rank: int
) -> RankLayout:
    own = [
        layer
        for layer in model.layers
        if layers.start <= layer.layer // model.numbers_per_layer < layers.stop
    ]
    drafts = model.draft_layers if layers.stop == model.depth else ()
    pages = [layer_pages(layer, settings, stage_rank) for layer in (*own, *drafts)]
    parts = {
        part.name: tuple(chain.from_iterable(getattr(layer, part.name) for layer in pages))
        for part in fields(LayerPages)
    }
    layout = RankLayout(rank, **parts)
    return join_layers(layout) if settings.cross_layer_blocks else layout


def stage_layers(depth: int, pp: int, layers_per_stage: Sequence[int] = ()) -> list[Span]:
    """Return the layers of every stage. Raises `StageError`.

    Without ``layers_per_stage`` stages are cut as in vLLM (`get_pp_indices`): evenly, and the
    remaining layers go to the stages before the last stage, a layer each, from the back.

    >>> [str(span) for span in stage_layers(10, 4)]
    ['[0, 2)', '[2, 5)', '[5, 8)', '[8, 10)']
    """
    counts = list(layers_per_stage)
    if not counts:
        if not 1 <= pp <= max(depth, 1):
            raise StageError(f"{depth} layers can't be cut into {pp} stages", stages=pp)
        counts = [depth // pp] * pp
        for back in range(2, depth % pp + 2):
            counts[-back] += 1
    if len(counts) != pp or sum(counts) != depth or min(counts) < 1:
        raise StageError(
            f"layers per stage are {counts}: {pp} stages need a number each, from 1 on, that "
            f"add up to {depth} layers",
            stages=pp,
        )
    return [
        Span(start, stop) for start, stop in itertools.pairwise([0, *itertools.accumulate(counts)])
    ]


def join_layers(rank: RankLayout) -> RankLayout:
    """Return the rank's layout with one region per group, whose pages hold those of all layers.

    The pages of layers lie in the order of the layers, with their own padding (vLLM's cross-layer
    blocks). Constant regions stay as they are.
    """
    joined: dict[str, Region] = {}
    begins: dict[str, tuple[str, int]] = {}
    constant = []
    for region in rank.regions:
        if region.constant:
            constant.append(region)
            continue
        before = joined.get(region.group)
        start = 0 if before is None else before.page_stride_bytes
        whole_bytes = start + region.page_stride_bytes
        joined[region.group] = replace(region, name=region.group, page_stride_bytes=whole_bytes)
        begins[region.name] = region.group, start
    return replace(
        rank,
        regions=(*joined.values(), *constant),
        shards=tuple(_moved(rank.shards, begins)),
        scratch=tuple(_moved(rank.scratch, begins)),
        inputs=tuple(_moved(rank.inputs, begins)),
    )


def _moved(placed: tuple[Placed, ...], begins: dict[str, tuple[str, int]]) -> Iterator[Placed]:
    for memory in placed:
        region, start = begins[memory.region]
        yield replace(memory, region=region, offset_bytes=memory.offset_bytes + start)
