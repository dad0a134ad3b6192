"""The proof that a layout is whole: every element of every field is held, and nothing collides.

Run once at registration, so that the planner needs no defensive ifs.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable

import numpy as np

from restow.broker.errors import (
    LayoutFormError,
    LayoutHoleError,
    LayoutMemoryError,
    LayoutOverlapError,
    LayoutStrideError,
    RanksDisagreeError,
)
from restow.broker.layout.rows import Int64s, count_rows, cut_rows
from restow.broker.layout.span import Box, Span, cells, holds, overlap, volume, whole
from restow.broker.layout.values import Field, Kind, Layout, RankLayout, Region, Shard

MAX_RANKS = 1024
MAX_SHARDS = 1 << 20
MAX_PAGE_BYTES = 1 << 36
MAX_RUNS_IN_PAGE = 1 << 22
MAX_CELLS_SEARCHED = 1 << 16


def check_layout(layout: Layout) -> None:
    """Raise a typed `LayoutError` that names field, axis, ranks and range; else return.

    Checked: names and shapes, strides (positive, inside the page, folding nothing), memory of
    a page claimed once, ranks that agree on dtypes and pages, every element held by some rank,
    overlaps only between equal boxes of different ranks.
    """
    _check_size(layout)
    fields = {field.name: field for field in layout.model.fields}
    checked: set[object] = set()
    for rank in layout.ranks:
        _check_rank(rank, fields, checked)
    _check_agreement(layout)
    held: dict[str, list[tuple[int, Box]]] = defaultdict(list)
    for rank in layout.ranks:
        for shard in rank.shards:
            held[shard.field].append((rank.rank, shard.box))
    proven: set[object] = set()
    for field in layout.model.fields:
        holders = held[field.name]
        signature = (field.shape, tuple(holders))
        if signature not in proven:
            _check_overlaps(field, holders)
            _check_cover(field, holders)
            proven.add(signature)


def _check_size(layout: Layout) -> None:
    if not layout.model.fields:
        raise LayoutFormError("the model has no fields: there is no state to hand over")
    if not 0 < len(layout.ranks) <= MAX_RANKS:
        raise LayoutFormError(f"{len(layout.ranks)} ranks; 1 to {MAX_RANKS} are allowed")
    shards = sum(len(rank.shards) for rank in layout.ranks)
    if shards > MAX_SHARDS:
        raise LayoutFormError(f"{shards} shards; at most {MAX_SHARDS} are allowed")
    _refuse_doubles("field", (field.name for field in layout.model.fields))
    _refuse_doubles("rank", (rank.rank for rank in layout.ranks))
    for field in layout.model.fields:
        if len(field.axes) != len(field.shape) or min(field.shape, default=1) < 1:
            raise LayoutFormError(
                f"field {field.name}: axes {field.axes} and shape {field.shape} do not fit",
                field=field.name,
            )


def _refuse_doubles(what: str, names: Iterable[object]) -> None:
    doubles = [name for name, count in Counter(names).items() if count > 1]
    if doubles:
        raise LayoutFormError(f"{what} {doubles[0]} is listed more than once")


def _check_rank(rank: RankLayout, fields: dict[str, Field], checked: set[object]) -> None:
    """Check names, strides and memory of one rank; ``checked`` remembers pages of equal form."""
    _refuse_doubles(f"rank {rank.rank}: region", (region.name for region in rank.regions))
    regions = {region.name: region for region in rank.regions}
    for region in rank.regions:
        _check_region(rank.rank, region)
    by_region: dict[str, list[Shard]] = defaultdict(list)
    for shard in rank.shards:
        if shard.region not in regions:
            raise LayoutFormError(
                f"rank {rank.rank}, field {shard.field}: region {shard.region!r} is not listed",
                field=shard.field,
                rank=rank.rank,
            )
        if shard.field not in fields:
            raise LayoutFormError(
                f"rank {rank.rank}: the model has no field {shard.field!r}",
                field=shard.field,
                rank=rank.rank,
            )
        _check_box(rank.rank, shard, fields[shard.field], regions[shard.region])
        by_region[shard.region].append(shard)
    for name, shards in by_region.items():
        region = regions[name]
        form = (
            region.page_stride_bytes,
            region.page_tokens,
            tuple(
                (s.offset_bytes, s.strides_bytes, s.token_stride_bytes, s.dtype, _sizes(s))
                for s in shards
            ),
        )
        if form not in checked:
            for shard in shards:
                _check_strides(rank.rank, shard, fields[shard.field], region)
            _check_memory(rank.rank, region, shards)
            checked.add(form)


def _check_region(rank: int, region: Region) -> None:
    positive = {
        "page_stride_bytes": region.page_stride_bytes,
        "page_tokens": 1 if region.page_tokens is None else region.page_tokens,
        "pages_per_block": region.pages_per_block,
    }
    for name, value in positive.items():
        if not 0 < value <= MAX_PAGE_BYTES:
            raise LayoutFormError(
                f"rank {rank}, region {region.name}: {name} is {value}; "
                f"it must be 1 to {MAX_PAGE_BYTES}",
                rank=rank,
                region=region.name,
            )


def _check_box(rank: int, shard: Shard, field: Field, region: Region) -> None:
    if len(shard.box) != len(field.axes) or len(shard.strides_bytes) != len(field.axes):
        raise LayoutFormError(
            f"rank {rank}, field {field.name}: box and strides need one entry for each of "
            f"{field.axes}",
            field=field.name,
            rank=rank,
        )
    for axis, span, size in zip(field.axes, shard.box, field.shape, strict=True):
        if span.stop > size:
            raise LayoutFormError(
                f"rank {rank}, field {field.name}, axis {axis}: {span} leaves [0, {size})",
                field=field.name,
                axis=axis,
                rank=rank,
                range=span,
            )
    per_token = field.kind is Kind.PER_TOKEN
    if per_token != (shard.token_stride_bytes is not None):
        raise LayoutFormError(
            f"rank {rank}, field {field.name}: token_stride_bytes is for per_token fields, "
            f"and they need one",
            field=field.name,
            rank=rank,
        )
    if per_token != (region.page_tokens is not None):
        raise LayoutFormError(
            f"rank {rank}, field {field.name} ({field.kind}): region {region.name} has "
            f"page_tokens {region.page_tokens}",
            field=field.name,
            rank=rank,
        )


def _sizes(shard: Shard) -> tuple[int, ...]:
    return tuple(span.size for span in shard.box)


def _strided(shard: Shard, region: Region) -> tuple[list[int], list[int]]:
    """Sizes and strides of a shard in a page, the token axis included."""
    sizes, strides = list(_sizes(shard)), list(shard.strides_bytes)
    if region.page_tokens is not None and shard.token_stride_bytes is not None:
        sizes.append(region.page_tokens)
        strides.append(shard.token_stride_bytes)
    return sizes, strides


def _check_strides(rank: int, shard: Shard, field: Field, region: Region) -> None:
    item = shard.dtype.itemsize_bytes
    sizes, strides = _strided(shard, region)
    axes = [*field.axes, "token"]
    reach = item
    for stride, size, axis in sorted(zip(strides, sizes, axes, strict=False)):
        if size == 1 and stride >= 0:
            continue
        if stride <= 0 or stride < reach:
            raise LayoutStrideError(
                f"rank {rank}, field {field.name}, axis {axis}: stride {stride} bytes is "
                + ("not positive" if stride <= 0 else f"less than the {reach} bytes inside it"),
                field=field.name,
                axis=axis,
                rank=rank,
                range=f"[{shard.offset_bytes}, {shard.offset_bytes + reach})",
            )
        reach += (size - 1) * stride
    end = shard.offset_bytes + reach
    if shard.offset_bytes < 0 or end > region.page_stride_bytes:
        raise LayoutStrideError(
            f"rank {rank}, field {field.name}: bytes [{shard.offset_bytes}, {end}) leave the "
            f"page of region {region.name}, which has {region.page_stride_bytes}",
            field=field.name,
            axis=max(zip(strides, axes, strict=False))[1],
            rank=rank,
            range=f"[{shard.offset_bytes}, {end})",
        )


def _check_memory(rank: int, region: Region, shards: list[Shard]) -> None:
    """No byte of a page belongs to two shards: sort all runs and look at neighbours."""
    runs: list[Int64s] = []
    total = 0
    for index, shard in enumerate(shards):
        item = shard.dtype.itemsize_bytes
        sizes, strides = _strided(shard, region)
        total += count_rows(sizes, strides, item)
        if total > MAX_RUNS_IN_PAGE:
            raise LayoutFormError(
                f"rank {rank}, region {region.name}: a page falls into more than "
                f"{MAX_RUNS_IN_PAGE} pieces",
                rank=rank,
                region=region.name,
            )
        rows = cut_rows(sizes, [strides], [item])
        step = rows.steps_bytes[0]
        starts = rows.offsets_bytes[:, 0] + shard.offset_bytes
        if step == item or rows.count == 1:
            lengths = np.full_like(starts, rows.count * item)
        else:
            starts = (starts[:, None] + np.arange(rows.count) * step).ravel()
            lengths = np.full_like(starts, item)
        runs.append(np.stack([starts, starts + lengths, np.full_like(starts, index)], axis=1))
    table = np.concatenate(runs)
    table = table[np.argsort(table[:, 0], kind="stable")]
    clash = np.flatnonzero(table[1:, 0] < table[:-1, 1])
    if clash.size:
        one, two = table[clash[0]], table[clash[0] + 1]
        fields = (shards[int(one[2])].field, shards[int(two[2])].field)
        span = f"[{two[0]}, {min(one[1], two[1])})"
        raise LayoutMemoryError(
            f"rank {rank}, region {region.name}: {fields[0]} and {fields[1]} both claim "
            f"bytes {span} of a page",
            field=fields[1],
            rank=rank,
            region=region.name,
            range=span,
        )


def _check_agreement(layout: Layout) -> None:
    dtypes: dict[str, tuple[int, str]] = {}
    groups: dict[str, tuple[int, tuple[int | None, int]]] = {}
    for rank in layout.ranks:
        for region in rank.regions:
            pages = (region.page_tokens, region.pages_per_block)
            first = groups.setdefault(region.group, (rank.rank, pages))
            if first[1] != pages:
                raise RanksDisagreeError(
                    f"group {region.group}: rank {first[0]} has (page_tokens, pages_per_block) "
                    f"{first[1]}, rank {rank.rank}, region {region.name} has {pages}",
                    group=region.group,
                    ranks=f"{first[0]},{rank.rank}",
                )
        for shard in rank.shards:
            known = dtypes.setdefault(shard.field, (rank.rank, shard.dtype.label))
            if known[1] != shard.dtype.label:
                raise RanksDisagreeError(
                    f"field {shard.field}: rank {known[0]} has {known[1]}, rank {rank.rank} has "
                    f"{shard.dtype.label}",
                    field=shard.field,
                    ranks=f"{known[0]},{rank.rank}",
                )


def _check_overlaps(field: Field, holders: list[tuple[int, Box]]) -> None:
    boxes: dict[Box, set[int]] = defaultdict(set)
    for rank, box in holders:
        if rank in boxes[box]:
            raise LayoutOverlapError(
                f"rank {rank} holds {field.name} {_text(box)} twice",
                field=field.name,
                axis=field.axes[0] if field.axes else "",
                ranks=rank,
                range=_text(box),
            )
        boxes[box].add(rank)
    for (one, ranks_one), (two, ranks_two) in itertools.combinations(boxes.items(), 2):
        common = overlap(one, two)
        if common is not None:
            axis = next(a for a, s, t in zip(field.axes, one, two, strict=True) if s != t)
            ranks = sorted(ranks_one | ranks_two)
            raise LayoutOverlapError(
                f"field {field.name}, axis {axis}: ranks {ranks} both hold {_text(common)}, "
                f"but {_text(one)} and {_text(two)} are not replicas of each other",
                field=field.name,
                axis=axis,
                ranks=ranks,
                range=_text(common),
            )


def _check_cover(field: Field, holders: list[tuple[int, Box]]) -> None:
    """Disjoint boxes cover a field when their volumes add up; if not, look for the hole."""
    boxes = {box for _, box in holders}
    everything = whole(field.shape)
    if sum(volume(box) for box in boxes) == volume(everything):
        return
    searched = itertools.islice(cells(everything, boxes), MAX_CELLS_SEARCHED)
    missing = (cell for cell in searched if not any(holds(box, cell) for box in boxes))
    hole = next(missing, everything)
    axis, span = _open_axis(field, hole)
    ranks = sorted({rank for rank, _ in holders})
    raise LayoutHoleError(
        f"field {field.name}, axis {axis}: no rank holds {span} "
        f"(box {_text(hole)}; ranks {ranks} hold other parts)",
        field=field.name,
        axis=axis,
        ranks=ranks,
        range=span,
    )


def _open_axis(field: Field, cell: Box) -> tuple[str, Span | str]:
    """The axis along which a missing cell is a part, and the missing range."""
    for axis, span, size in zip(field.axes, cell, field.shape, strict=True):
        if span.size < size:
            return axis, span
    return (field.axes[0], cell[0]) if field.axes else ("", "all")


def _text(box: Box) -> str:
    return " x ".join(str(span) for span in box)
