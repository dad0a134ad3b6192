"""Of one rank: do its shards lie inside their pages, each byte claimed once?"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from restow.broker.errors import LayoutFormError, LayoutMemoryError, LayoutStrideError
from restow.broker.layout.check_inputs import check_region_use, weights_as_shard
from restow.broker.layout.rows import Int64s, count_rows, cut_rows
from restow.broker.layout.span import Span
from restow.broker.layout.values import Field, Kind, Model, RankLayout, Region, Scratch, Shard

MAX_PAGE_BYTES = 1 << 36
MAX_AXES = 16
MAX_PAGES_PER_BLOCK = 1 << 20
MAX_BLOCK = 2**31 - 1
"""Block ids travel as int32."""
MAX_TOKENS = 2**31 - 1
"""Positions travel as int32."""
MAX_RUNS = 1 << 21
"""Runs of bytes that all pages of different form fall into, together."""


class PageChecker:
    """Checks the ranks of one layout; pages of equal form are looked at once."""

    def __init__(self, model: Model) -> None:
        """Start with nothing checked."""
        self._fields = {field.name: field for field in (*model.fields, *model.inputs)}
        self._state = {field.name for field in model.fields}
        self._checked: set[object] = set()
        self._runs = 0

    def check(self, rank: RankLayout) -> None:
        """Raise `LayoutFormError`, `LayoutStrideError` or `LayoutMemoryError`; else return."""
        regions = {region.name: region for region in rank.regions}
        for region in rank.regions:
            _check_region(rank.rank, region)
        by_region: dict[str, list[Shard]] = defaultdict(list)
        fields = dict(self._fields)
        for number, scratch in enumerate(rank.scratch):
            field, shard = _as_shard(rank.rank, scratch, number, regions)
            fields[field.name] = field
            by_region[shard.region].append(shard)
        for weights in rank.projections:
            conv, read = self._fields[weights.field], self._fields[weights.input]
            field, shard = weights_as_shard(weights, conv, read)
            fields[field.name] = field
            by_region[shard.region].append(shard)
        states = [(shard, True) for shard in rank.shards]
        for shard, is_state in (*states, *((shard, False) for shard in rank.inputs)):
            if shard.field not in self._fields or (shard.field in self._state) != is_state:
                raise LayoutFormError(
                    f"rank {rank.rank}: the model has no {'field' if is_state else 'input'} "
                    f"{shard.field!r}",
                    field=shard.field,
                    ranks=rank.rank,
                )
            if shard.region not in regions:
                raise LayoutFormError(
                    f"rank {rank.rank}, field {shard.field}: region {shard.region!r} is not listed",
                    field=shard.field,
                    region=shard.region,
                    ranks=rank.rank,
                )
            _check_box(rank.rank, shard, self._fields[shard.field], regions[shard.region])
            by_region[shard.region].append(shard)
        check_region_use(rank, {shard.region for shard in (*rank.shards, *rank.inputs)})
        for name, shards in by_region.items():
            form = _form(regions[name], shards)
            if form not in self._checked:
                for shard in shards:
                    _check_strides(rank.rank, shard, fields[shard.field], regions[name])
                self._count_runs(rank.rank, regions[name], shards)
                _check_memory(rank.rank, regions[name], shards)
                self._checked.add(form)

    def _count_runs(self, rank: int, region: Region, shards: list[Shard]) -> None:
        for shard in shards:
            sizes, strides = _strided(shard, region)
            self._runs += count_rows(sizes, strides, shard.dtype.itemsize_bytes)
            if self._runs > MAX_RUNS:
                raise LayoutFormError(
                    f"rank {rank}, region {region.name}, field {shard.field}: the pages fall into "
                    f"more than {MAX_RUNS} pieces",
                    field=shard.field,
                    region=region.name,
                    ranks=rank,
                )


def _as_shard(
    rank: int, scratch: Scratch, number: int, regions: dict[str, Region]
) -> tuple[Field, Shard]:
    """Scratch memory as a shard of a field of its own: the same must hold of its place."""
    region = regions.get(scratch.region)
    sizes, strides = scratch.sizes, scratch.strides_bytes
    wrong = ""
    if region is None:
        wrong = "the region is not listed"
    elif region.page_tokens is not None:
        wrong = "only pages of snapshots have scratch memory"
    elif len(sizes) != len(strides) or len(sizes) > MAX_AXES:
        wrong = f"{len(sizes)} sizes and {len(strides)} strides; at most {MAX_AXES} of each"
    elif any(not 0 < size <= MAX_PAGE_BYTES for size in sizes):
        wrong = f"sizes {list(sizes)} are not all 1 to {MAX_PAGE_BYTES}"
    if wrong:
        raise LayoutFormError(
            f"rank {rank}, scratch memory of region {scratch.region}: {wrong}",
            region=scratch.region,
            ranks=rank,
        )
    name = f"(scratch {number})"
    axes = tuple(f"scratch axis {axis}" for axis in range(len(sizes)))
    box = tuple(Span(0, size) for size in sizes)
    shard = Shard(name, box, scratch.dtype, scratch.region, scratch.offset_bytes, strides)
    return Field(name, Kind.SNAPSHOT, axes, sizes), shard


def _form(region: Region, shards: list[Shard]) -> object:
    """All that strides and memory of a page depend on."""
    return (
        region.page_stride_bytes,
        region.page_tokens,
        tuple(
            (s.offset_bytes, s.strides_bytes, s.token_stride_bytes, s.dtype, _sizes(s))
            for s in shards
        ),
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


def _check_region(rank: int, region: Region) -> None:
    tokens = 1 if region.page_tokens is None else region.page_tokens
    for name, value, limit in (
        ("page_stride_bytes", region.page_stride_bytes, MAX_PAGE_BYTES),
        ("page_tokens", tokens, MAX_TOKENS),
        ("pages_per_block", region.pages_per_block, MAX_PAGES_PER_BLOCK),
    ):
        if not 0 < value <= limit:
            raise LayoutFormError(
                f"rank {rank}, region {region.name}: {name} is {value}; it must be 1 to {limit}",
                ranks=rank,
                region=region.name,
            )
    null = region.null_block
    if null is not None and (region.constant or not 0 <= null <= MAX_BLOCK):
        raise LayoutFormError(
            f"rank {rank}, region {region.name}: null_block is {null}; it must be 0 to "
            f"{MAX_BLOCK}, and a constant region has none",
            ranks=rank,
            region=region.name,
        )
    if region.page_tokens is None and region.pages_per_block != 1:
        raise LayoutFormError(
            f"rank {rank}, region {region.name}: pages_per_block is {region.pages_per_block}, but "
            f"a block of snapshots is one page",
            ranks=rank,
            region=region.name,
        )


def _check_box(rank: int, shard: Shard, field: Field, region: Region) -> None:
    if len(shard.box) != len(field.axes) or len(shard.strides_bytes) != len(field.axes):
        raise LayoutFormError(
            f"rank {rank}, field {field.name}: box and strides need one entry for each of "
            f"{list(field.axes)}",
            field=field.name,
            ranks=rank,
        )
    for axis, span, size in zip(field.axes, shard.box, field.shape, strict=True):
        if span.stop > size:
            raise LayoutFormError(
                f"rank {rank}, field {field.name}, axis {axis}: {span} leaves [0, {size})",
                field=field.name,
                axis=axis,
                ranks=rank,
                range=span,
            )
    per_token = field.kind is Kind.PER_TOKEN
    if per_token != (shard.token_stride_bytes is not None):
        raise LayoutFormError(
            f"rank {rank}, field {field.name}: token_stride_bytes is for per_token fields, "
            f"and they need one",
            field=field.name,
            axis="token",
            ranks=rank,
        )
    if per_token != (region.page_tokens is not None):
        raise LayoutFormError(
            f"rank {rank}, field {field.name} ({field.kind}): region {region.name} has "
            f"page_tokens {region.page_tokens}",
            field=field.name,
            axis="token",
            region=region.name,
            ranks=rank,
        )


def _check_strides(rank: int, shard: Shard, field: Field, region: Region) -> None:
    """Each axis steps over all that the smaller ones reach, and the last byte is in the page."""
    reach = shard.dtype.itemsize_bytes
    sizes, strides = _strided(shard, region)
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


def _check_memory(rank: int, region: Region, shards: list[Shard]) -> None:
    """No byte of a page belongs to two shards: sort all runs and look at neighbours."""
    table = np.concatenate([_runs(shard, region, index) for index, shard in enumerate(shards)])
    table = table[np.argsort(table[:, 0], kind="stable")]
    clash = np.flatnonzero(table[1:, 0] < table[:-1, 1])
    if clash.size:
        one, two = table[clash[0]], table[clash[0] + 1]
        first, second = shards[int(one[2])], shards[int(two[2])]
        span = f"[{two[0]}, {min(one[1], two[1])})"
        raise LayoutMemoryError(
            f"rank {rank}, region {region.name}: {first.field} {_text(first)} and {second.field} "
            f"{_text(second)} both claim bytes {span} of a page",
            field=second.field,
            other_field=first.field,
            ranks=rank,
            region=region.name,
            range=span,
        )


def _runs(shard: Shard, region: Region, index: int) -> Int64s:
    """The runs of bytes of a shard in a page: ``[runs, 3]`` of start, stop and ``index``."""
    item = shard.dtype.itemsize_bytes
    sizes, strides = _strided(shard, region)
    rows = cut_rows(sizes, [strides], [item])
    if rows.count > 1 and rows.steps_bytes[0] != item:
        rows = rows.elements()
    starts = rows.offsets_bytes[:, 0] + shard.offset_bytes
    stops = starts + rows.count * item
    return np.stack([starts, stops, np.full_like(starts, index)], axis=1)


def _text(shard: Shard) -> str:
    return " x ".join(str(span) for span in shard.box)
