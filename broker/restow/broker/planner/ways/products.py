"""Rows of products: channels of a window, each from its weights and the inputs of all taps."""

from __future__ import annotations

import numpy as np

from restow.broker.layout import Projection, RankLayout, Shard
from restow.broker.layout.rows import Int64s, cut_rows
from restow.broker.planner.program import ProjectColumn
from restow.broker.planner.program.rows import joined
from restow.broker.planner.ways.spans import SPAN_ALIGN_BYTES


def product_rows(
    rank: RankLayout, weights: Projection, shard: Shard, tap: int, kept: Shard, span: int, pair: int
) -> Int64s:
    """The rows that rebuild ``shard`` of ``rank`` from ``weights`` and ``kept`` inputs of a span.

    The axes of channels, all but ``tap``, are merged where they go on alike in the weights and in
    the window.
    """
    regions = {region.name: index for index, region in enumerate(rank.regions)}
    taps, hidden = (part.size for part in kept.box)
    sizes = [part.size for axis, part in enumerate(shard.box) if axis != tap]
    there = [stride for axis, stride in enumerate(shard.strides_bytes) if axis != tap]
    cut = cut_rows(sizes, (weights.strides_bytes[:-1], there), (0, 0))
    rows = np.zeros((len(cut.offsets_bytes), len(ProjectColumn)), np.int64)
    rows[:] = (
        span,
        kept.offset_bytes % SPAN_ALIGN_BYTES,
        kept.strides_bytes[0],
        taps,
        hidden,
        weights.dtype,
        regions[weights.region],
        weights.offset_bytes,
        cut.steps_bytes[0],
        cut.count,
        pair,
        regions[shard.region],
        shard.offset_bytes,
        cut.steps_bytes[1],
        shard.strides_bytes[tap],
        shard.dtype,
    )
    rows[:, _OFFSETS] += cut.offsets_bytes
    return rows


_OFFSETS = [ProjectColumn.WEIGHT_OFFSET_BYTES, ProjectColumn.DST_OFFSET_BYTES]
_STRIDES = [ProjectColumn.WEIGHT_STRIDE_BYTES, ProjectColumn.DST_STRIDE_BYTES]
_SAME = [c for c in ProjectColumn if c not in (*_OFFSETS, ProjectColumn.CHANNELS)]


def joined_products(rows: Int64s) -> Int64s:
    """Join rows whose channels continue each other, across fields too: few products of many."""
    return joined(rows, _SAME, _OFFSETS, ProjectColumn.CHANNELS, _STRIDES)[0]
