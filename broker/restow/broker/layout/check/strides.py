"""Of one page: do its shards lie inside, each element apart, and each byte claimed once?"""

from __future__ import annotations

import numpy as np

from restow.broker.errors import LayoutMemoryError, LayoutStrideError
from restow.broker.layout.limits import MAX_PAGE_BYTES
from restow.broker.layout.rows import Int64s, cut_rows
from restow.broker.layout.span import Span, box_text
from restow.broker.layout.values import Field, RankLayout, Region, Shard


def sizes_and_strides(shard: Shard, region: Region) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and strides of a shard in a page, the token axis included."""
    sizes, strides = tuple(span.size for span in shard.box), shard.strides_bytes
    if region.page_tokens is not None and shard.token_stride_bytes is not None:
        return (*sizes, region.page_tokens), (*strides, shard.token_stride_bytes)
    return sizes, strides


def check_strides(rank: int, shard: Shard, field: Field, region: Region) -> None:
    """Each axis steps over all that the smaller ones reach, and the last byte is in the page."""
    reach = shard.dtype.itemsize_bytes
    sizes, strides = sizes_and_strides(shard, region)
    axes = [*field.axes, "token"]
    outermost = ""
    for stride, size, axis in sorted(zip(strides, sizes, axes, strict=False)):
        if size == 1 and 0 <= stride <= MAX_PAGE_BYTES:
            continue
        if stride <= 0 or stride < reach or stride > MAX_PAGE_BYTES:
            if stride <= 0:
                wrong = "is not positive"
            elif stride < reach:
                wrong = f"folds elements: it is less than the {reach} bytes inside it"
            else:
                wrong = f"is more than {MAX_PAGE_BYTES}"
            raise LayoutStrideError(
                f"rank {rank}, field {field.name}, axis {axis}: stride {stride} bytes {wrong}",
                field=field.name,
                axis=axis,
                ranks=rank,
                range=f"[{shard.offset_bytes}, {shard.offset_bytes + reach})",
            )
        reach += (size - 1) * stride
        outermost = axis
    end = shard.offset_bytes + reach
    if shard.offset_bytes < 0 or end > region.page_stride_bytes:
        raise LayoutStrideError(
            f"rank {rank}, field {field.name}: bytes [{shard.offset_bytes}, {end}) leave the "
            f"page of region {region.name}, which has {region.page_stride_bytes}"
            + (f"; the largest stride is that of axis {outermost}" if outermost else ""),
            field=field.name,
            axis=outermost,
            ranks=rank,
            region=region.name,
            range=f"[{shard.offset_bytes}, {end})",
        )


def check_memory(rank: int, region: Region, shards: list[Shard]) -> None:
    """No byte of a page belongs to two shards: sort all runs and look at neighbours."""
    table = np.concatenate([_runs(shard, region, index) for index, shard in enumerate(shards)])
    table = table[np.argsort(table[:, 0], kind="stable")]
    clash = np.flatnonzero(table[1:, 0] < table[:-1, 1])
    if clash.size:
        one, two = table[clash[0]], table[clash[0] + 1]
        first, second = shards[int(one[2])], shards[int(two[2])]
        span = f"[{two[0]}, {min(one[1], two[1])})"
        raise LayoutMemoryError(
            f"rank {rank}, region {region.name}: {first.field} {box_text(first.box)} and "
            f"{second.field} {box_text(second.box)} both claim bytes {span} of a page",
            field=second.field,
            other_field=first.field,
            ranks=rank,
            region=region.name,
            range=span,
        )


def page_runs(rank: RankLayout, region: Region) -> Int64s:
    """Return the bytes of a page that anything lies in, as runs that rise: ``[runs, 2]``."""
    shards = [one for one in (*rank.shards, *rank.inputs) if one.region == region.name]
    for one in rank.scratch:
        if one.region == region.name:
            box = tuple(Span(0, size) for size in one.sizes)
            place = (one.region, one.offset_bytes, one.strides_bytes)
            shards.append(Shard("", box, one.dtype, *place))
    if not shards:
        return np.empty((0, 2), np.int64)
    table = np.concatenate([_runs(shard, region, 0)[:, :2] for shard in shards])
    table = table[np.argsort(table[:, 0], kind="stable")]
    begins = np.concatenate([[True], table[1:, 0] > table[:-1, 1]])
    lasts = np.concatenate([begins[1:], [True]])
    return np.stack([table[begins, 0], table[lasts, 1]], axis=1)


def _runs(shard: Shard, region: Region, index: int) -> Int64s:
    """The runs of bytes of a shard in a page: ``[runs, 3]`` of start, stop and ``index``."""
    item = shard.dtype.itemsize_bytes
    sizes, strides = sizes_and_strides(shard, region)
    rows = cut_rows(sizes, [strides], [item])
    if rows.count > 1 and rows.steps_bytes[0] != item:
        rows = rows.elements()
    starts = rows.offsets_bytes[:, 0] + shard.offset_bytes
    stops = starts + rows.count * item
    return np.stack([starts, stops, np.full_like(starts, index)], axis=1)
