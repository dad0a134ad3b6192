"""Rows that are zeroed when a state arrives: scratch memory, and fields that begin cold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from restow.broker.errors import TooManyPiecesError
from restow.broker.layout import DType, Kind, RankLayout, Region, Scratch, Shard
from restow.broker.layout.rows import MAX_ROWS, Int64s, cut_rows
from restow.broker.planner.plan import Plan
from restow.broker.planner.program import NO_LIST, Column, GroupPair, PageForm, no_rows
from restow.broker.planner.program.rows import join_rows


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


class ColdRows:
    """Makes the rows of fields that begin cold, in pairs of lists of which P has none."""

    def __init__(self, plan: Plan, first_pair: int) -> None:
        """Number the pairs of all ranks from ``first_pair`` on."""
        self._first = first_pair
        self._numbers: dict[GroupPair, int] = {}
        self._fields = {f.name: f for f in plan.destination.model.fields if f.name in plan.cold}
        for rank in plan.destination.ranks:
            regions = {region.name: region for region in rank.regions}
            for shard in rank.shards:
                if shard.field in self._fields:
                    self._pair(regions[shard.region], shard)

    @property
    def pairs(self) -> tuple[GroupPair, ...]:
        """The pairs of page lists, in the order of their numbers."""
        return tuple(self._numbers)

    def rows(self, rank: RankLayout) -> Int64s:
        """All that ``rank`` holds of such fields; those of tokens repeat for each that moves.

        Raises `TooManyPiecesError`.
        """
        regions = {region.name: (index, region) for index, region in enumerate(rank.regions)}
        tables = [no_rows()]
        for shard in rank.shards:
            if shard.field in self._fields:
                index, region = regions[shard.region]
                tables.append(_shard_rows(shard, index, region, self._pair(region, shard)))
        rows, _ = join_rows(np.concatenate(tables))
        if len(rows) > MAX_ROWS:
            raise TooManyPiecesError(f"fields that begin cold fall into over {MAX_ROWS} pieces")
        rows[:, Column.SRC_OFFSET_BYTES] = 0
        return rows

    def _pair(self, region: Region, shard: Shard) -> int:
        field = self._fields[shard.field]
        tokens = region.page_tokens or 0 if field.kind is Kind.PER_TOKEN else 0
        form = PageForm(
            region.group, tokens, region.pages_per_block, region.tokens, region.whole_blocks
        )
        pair = GroupPair(replace(form, group=NO_LIST), form, field.window_tokens)
        return self._numbers.setdefault(pair, self._first + len(self._numbers))


def _shard_rows(shard: Shard, index: int, region: Region, pair: int) -> Int64s:
    """The rows of a shard as if it were scratch memory of a page, for each of its tokens."""
    sizes = tuple(span.size for span in shard.box)
    place = (shard.region, shard.dtype, shard.offset_bytes, sizes, shard.strides_bytes)
    stride = shard.token_stride_bytes or 0
    rows = _rows(Scratch(*place), index, region, pair, stride)
    rows[:, [Column.SRC_TOKEN_STRIDE_BYTES, Column.DST_TOKEN_STRIDE_BYTES]] = stride
    rows[:, Column.SRC_OFFSET_BYTES] = rows[:, Column.DST_OFFSET_BYTES]  # so that they are joined
    return rows


def _rows(
    scratch: Scratch, index: int, region: Region, pair: int, token_stride_bytes: int = 0
) -> Int64s:
    """Runs of bytes, or strided elements that lie at multiples of their size."""
    item = scratch.dtype.itemsize_bytes
    # No axis counts as contiguous: the longest one is the row, unless all are one run anyway.
    cut = cut_rows(scratch.sizes, (scratch.strides_bytes,), (0,))
    steps = (region.page_stride_bytes, token_stride_bytes, *scratch.strides_bytes)
    places = (scratch.offset_bytes, *steps)
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
