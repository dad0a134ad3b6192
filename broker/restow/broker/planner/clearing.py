"""Rows of scratch memory, which are zeroed when a state arrives."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from restow.broker.errors import TooManyPiecesError
from restow.broker.layout import DType, RankLayout, Region, Scratch
from restow.broker.layout.rows import MAX_ROWS, Int64s, cut_rows
from restow.broker.planner.program import Column, GroupPair, no_rows


def cleared_rows(rank: RankLayout, pairs: Sequence[GroupPair]) -> Int64s:
    """The scratch memory of ``rank`` in those groups for which states arrive at all.

    Raises `TooManyPiecesError`.
    """
    numbers = {pair.dst.group: number for number, pair in enumerate(pairs) if not pair.per_token}
    regions = {region.name: (index, region) for index, region in enumerate(rank.regions)}
    tables = [no_rows()]
    for scratch in rank.scratch:
        index, region = regions[scratch.region]
        if region.group in numbers:
            tables.append(_rows(scratch, index, region, numbers[region.group]))
    rows = np.concatenate(tables)
    if len(rows) > MAX_ROWS:
        raise TooManyPiecesError(f"scratch memory falls into more than {MAX_ROWS} pieces")
    return rows


def _rows(scratch: Scratch, index: int, region: Region, pair: int) -> Int64s:
    """Runs of bytes, or strided elements that lie at multiples of their size."""
    item = scratch.dtype.itemsize_bytes
    # No axis counts as contiguous: the longest one is the row, unless all are one run anyway.
    cut = cut_rows(scratch.sizes, (scratch.strides_bytes,), (0,))
    places = (scratch.offset_bytes, region.page_stride_bytes, *scratch.strides_bytes)
    raw = cut.count == 1 or cut.steps_bytes == (item,)
    if not raw and any(place % item for place in places):
        cut, raw = cut.elements(), True
    rows = np.zeros((len(cut.offsets_bytes), len(Column)), np.int64)
    rows[:, Column.GROUP_PAIR] = pair
    rows[:, Column.DST_REGION] = index
    rows[:, Column.DST_OFFSET_BYTES] = scratch.offset_bytes + cut.offsets_bytes[:, 0]
    rows[:, Column.COUNT] = cut.count * item if raw else cut.count
    rows[:, [Column.SRC_STEP_BYTES, Column.DST_STEP_BYTES]] = 1 if raw else cut.steps_bytes[0]
    dtype = DType.UINT8 if raw else scratch.dtype
    rows[:, [Column.SRC_DTYPE, Column.DST_DTYPE]] = dtype
    return rows
