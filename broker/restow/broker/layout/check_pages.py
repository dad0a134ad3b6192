"""Prove that the shards of a rank share no bytes of a page and fit into its regions.

`check_inputs` checks mixer inputs and projections, from which conv windows can be recomputed;
`PageChecker` checks the pages.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from restow.broker.errors import LayoutFormError, LayoutMemoryError, LayoutStrideError
from restow.broker.layout.rows import Int64s, count_rows, cut_rows
from restow.broker.layout.span import Span, box_text, volume
from restow.broker.layout.values import (
    MAX_AXES,
    MAX_BLOCK,
    MAX_CHANNELS,
    MAX_HIDDEN,
    MAX_PAGE_BYTES,
    MAX_PAGES_PER_BLOCK,
    MAX_RANKS,
    MAX_RUNS,
    MAX_TAPS,
    MAX_TOKENS,
    Field,
    Kind,
    Layout,
    Model,
    Projection,
    RankLayout,
    Region,
    Scratch,
    Shard,
)

INPUT_AXES = ("tap", "hidden")


def check_inputs(layout: Layout) -> None:
    """Raise `LayoutFormError` or `LayoutStrideError` if an input or a projection is invalid.

    `PageChecker` checks their places inside of pages.
    """
    inputs = {field.name: field for field in layout.model.inputs}
    fields = {field.name: field for field in layout.model.fields}
    for field in inputs.values():
        if field.kind is not Kind.SNAPSHOT or field.axes != INPUT_AXES:
            raise LayoutFormError(
                f"input {field.name}: it must be a snapshot with the axes {list(INPUT_AXES)}",
                field=field.name,
            )
        if field.shape[0] > MAX_TAPS or field.shape[1] > MAX_HIDDEN:
            raise LayoutFormError(
                f"input {field.name}: {list(field.shape)} is more than {MAX_TAPS} taps of "
                f"{MAX_HIDDEN}",
                field=field.name,
            )
    for rank in layout.ranks:
        for shard in rank.inputs:
            _check_input(rank.rank, shard, inputs.get(shard.field))
        types = {(shard.field, shard.box): shard.dtype for shard in rank.shards}
        regions = {region.name: region for region in rank.regions}
        offered = set()
        for weights in rank.projections:
            why = _misfit(weights, fields.get(weights.field), inputs.get(weights.input), regions)
            held = types.get((weights.field, weights.box))
            if not why:
                if held is None:
                    why = "the rank has no shard of that box"
                elif not held.castable:
                    why = f"no number can be converted to the {held.label} of its shard"
                elif (weights.field, weights.box) in offered:
                    why = "it is listed more than once"
            if why:
                raise LayoutFormError(
                    f"rank {rank.rank}, projection of {weights.field}: {why}",
                    field=weights.field,
                    ranks=rank.rank,
                    region=weights.region,
                )
            offered.add((weights.field, weights.box))


def _check_input(rank: int, shard: Shard, field: Field | None) -> None:
    """Check that an input is held whole, as aligned rows of numbers without gaps in a row."""
    item = shard.dtype.itemsize_bytes
    wrong = ""
    if field is None:
        wrong = "the model does not list this input"
    elif shard.box != tuple(Span(0, size) for size in field.shape):
        wrong = "a rank must keep all of an input"
    elif not shard.dtype.castable:
        wrong = f"{shard.dtype.label} cannot be multiplied"
    elif len(shard.strides_bytes) != 2 or shard.strides_bytes[1] != item:
        wrong = f"strides {list(shard.strides_bytes)}: a row must have no gaps"
    elif shard.offset_bytes % item or shard.strides_bytes[0] % item:
        wrong = f"its numbers must lie at multiples of {item} bytes"
    if wrong:
        raise LayoutStrideError(
            f"rank {rank}, input {shard.field}: {wrong}",
            field=shard.field,
            ranks=rank,
            region=shard.region,
        )


def _misfit(
    weights: Projection,
    field: Field | None,
    read: Field | None,
    regions: dict[str, Region],
) -> str:
    """Return why a projection is invalid; empty if it is valid."""
    item = weights.dtype.itemsize_bytes
    region = regions.get(weights.region)
    if field is None:
        return "the model does not have this field"
    if read is None:
        return f"the model has no input {weights.input!r}"
    if field.kind is not Kind.SNAPSHOT or "tap" not in field.axes:
        return "only windows (snapshots with an axis tap) can be recomputed"
    tap = field.axes.index("tap")
    if field.shape[tap] != read.shape[0]:
        return f"it has {field.shape[tap]} taps, input {read.name} has {read.shape[0]}"
    if len(weights.box) != len(field.axes) or weights.box[tap] != Span(0, field.shape[tap]):
        return "its box needs one range for each axis, and all taps"
    if region is None or not region.constant:
        return f"region {weights.region!r} is not listed, or is not constant (it has a group)"
    if not weights.dtype.castable:
        return f"{weights.dtype.label} cannot be multiplied"
    strides = weights.strides_bytes
    if len(strides) != len(field.axes) or strides[-1] != item:
        return (
            f"strides {list(strides)}: they need one entry for each axis but tap, and {item} bytes "
            f"as the last entry, because a row of weights has no gaps"
        )
    if any(stride % item for stride in (weights.offset_bytes, *strides)):
        return f"its numbers must lie at multiples of {item} bytes"
    if volume(weights.box) > MAX_CHANNELS:
        return f"it has more than {MAX_CHANNELS} channels"
    return ""


def weights_as_shard(weights: Projection, field: Field, read: Field) -> tuple[Field, Shard]:
    """Return weights as a shard of a field of their own, so that the checks of shards apply.

    The axis tap of the conv field ``field`` is replaced by the hidden axis of the input ``read``.
    """
    tap = field.axes.index("tap")
    name = f"(weights of {field.name} {box_text(weights.box)})"
    axes = (*field.axes[:tap], *field.axes[tap + 1 :], "hidden")
    return Field(name, Kind.SNAPSHOT, axes, ()), Shard(
        name,
        (*weights.box[:tap], *weights.box[tap + 1 :], Span(0, read.shape[1])),
        weights.dtype,
        weights.region,
        weights.offset_bytes,
        weights.strides_bytes,
    )


def sizes_and_strides(shard: Shard, region: Region) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return sizes and strides of a shard in a page, including the token axis."""
    sizes, strides = tuple(span.size for span in shard.box), shard.strides_bytes
    if region.page_tokens is not None and shard.token_stride_bytes is not None:
        return (*sizes, region.page_tokens), (*strides, shard.token_stride_bytes)
    return sizes, strides


def check_strides(rank: int, shard: Shard, field: Field, region: Region) -> None:
    """Check that strides separate all elements, and that the shard ends in the page."""
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
                wrong = f"folds elements: it is less than the {reach} bytes within it"
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
    """Check that no byte belongs to two shards by sorting all runs and comparing neighbours."""
    table = np.concatenate([_runs(shard, region, index) for index, shard in enumerate(shards)])
    table = table[np.argsort(table[:, 0], kind="stable")]
    clash = np.flatnonzero(table[1:, 0] < table[:-1, 1])
    if clash.size:
        before, after = table[clash[0]], table[clash[0] + 1]
        first, second = shards[int(before[2])], shards[int(after[2])]
        span = f"[{after[0]}, {min(before[1], after[1])})"
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
    """Return the bytes of a page that hold anything, as rising runs: ``[runs, 2]``."""
    shards = [shard for shard in (*rank.shards, *rank.inputs) if shard.region == region.name]
    for scratch in rank.scratch:
        if scratch.region == region.name:
            box = tuple(Span(0, size) for size in scratch.sizes)
            place = (scratch.region, scratch.offset_bytes, scratch.strides_bytes)
            shards.append(Shard("", box, scratch.dtype, *place))
    if not shards:
        return np.empty((0, 2), np.int64)
    table = np.concatenate([_runs(shard, region, 0)[:, :2] for shard in shards])
    table = table[np.argsort(table[:, 0], kind="stable")]
    begins = np.concatenate([[True], table[1:, 0] > table[:-1, 1]])
    lasts = np.concatenate([begins[1:], [True]])
    return np.stack([table[begins, 0], table[lasts, 1]], axis=1)


def _runs(shard: Shard, region: Region, index: int) -> Int64s:
    """Return a shard's runs of bytes in a page, ``[runs, 3]``: start, stop and ``index``."""
    item = shard.dtype.itemsize_bytes
    sizes, strides = sizes_and_strides(shard, region)
    rows = cut_rows(sizes, [strides], [item])
    if rows.count > 1 and rows.steps_bytes[0] != item:
        rows = rows.elements()
    starts = rows.offsets_bytes[:, 0] + shard.offset_bytes
    stops = starts + rows.count * item
    return np.stack([starts, stops, np.full_like(starts, index)], axis=1)


def check_regions(rank: RankLayout) -> None:
    """Raise `LayoutFormError` for a number outside of its limits."""
    for region in rank.regions:
        if wrong := _why_invalid(region):
            raise _error(rank, region, wrong)


def check_region_use(rank: RankLayout) -> None:
    """Raise `LayoutFormError` for a constant region that holds anything but weights."""
    used = {shard.region for shard in (*rank.shards, *rank.inputs)}
    used |= {scratch.region for scratch in rank.scratch}
    for region in rank.regions:
        if region.constant and (region.page_tokens is not None or region.name in used):
            raise _error(
                rank,
                region,
                "a region without a group is constant: it holds only weights of projections, and "
                "no tokens",
            )


def _why_invalid(region: Region) -> str:
    tokens = 1 if region.page_tokens is None else region.page_tokens
    for name, value, limit in (
        ("page_stride_bytes", region.page_stride_bytes, MAX_PAGE_BYTES),
        ("page_tokens", tokens, MAX_TOKENS),
        ("pages_per_block", region.pages_per_block, MAX_PAGES_PER_BLOCK),
    ):
        if not 0 < value <= limit:
            return f"{name} is {value}; it must be 1 to {limit}"
    null, blocks = region.null_block, region.pages_per_block
    if null is not None and (region.constant or not 0 <= null <= MAX_BLOCK):
        return f"null_block is {null}; it must be 0 to {MAX_BLOCK}, and a constant region has none"
    if region.page_tokens is None and blocks != 1:
        return f"pages_per_block is {blocks}, but a block of snapshots is one page"
    if region.page_tokens is None and region.whole_blocks:
        return "whole_blocks is for pages of tokens"
    return _why_tokens_invalid(region)


def _why_tokens_invalid(region: Region) -> str:
    """Return why a region cannot hold the tokens that it claims; empty if it can."""
    parts, part, run = region.context_parts, region.context_part, region.interleave_tokens
    if not 0 < parts <= MAX_RANKS or not 0 <= part < parts:
        return (
            f"context_part is {part} of {parts}; there are 1 to {MAX_RANKS} parts, numbered from 0"
        )
    if parts == 1:
        return f"interleave_tokens is {run}, but there is only a single part" if run != 1 else ""
    if region.page_tokens is None:
        return f"context_parts is {parts}, but only tokens can be divided among ranks"
    held = region.page_tokens * region.pages_per_block
    if run < 1 or held % run:
        return f"interleave_tokens is {run}; it must divide the {held} tokens of a block"
    return ""


def _error(rank: RankLayout, region: Region, wrong: str) -> LayoutFormError:
    return LayoutFormError(
        f"rank {rank.rank}, region {region.name}: {wrong}", ranks=rank.rank, region=region.name
    )


class PageChecker:
    """Check the ranks of a layout; pages of the same form are checked only once."""

    def __init__(self, model: Model) -> None:
        """Begin without checked pages."""
        self._fields = {field.name: field for field in model.fields}
        self._inputs = {field.name: field for field in model.inputs}
        self._checked: set[object] = set()
        self._runs = 0

    def check(self, rank: RankLayout) -> None:
        """Raise a `LayoutError` for an invalid rank: its form, strides or memory."""
        regions = {region.name: region for region in rank.regions}
        check_regions(rank)
        lying: dict[str, list[tuple[Field, Shard]]] = defaultdict(list)
        for number, scratch in enumerate(rank.scratch):
            lying[scratch.region].append(_as_shard(rank.rank, scratch, number, regions))
        for weights in rank.projections:
            window, read = self._fields[weights.field], self._inputs[weights.input]
            lying[weights.region].append(weights_as_shard(weights, window, read))
        for word, shards, fields in (
            ("field", rank.shards, self._fields),
            ("input", rank.inputs, self._inputs),
        ):
            for shard in shards:
                field, region = fields.get(shard.field), regions.get(shard.region)
                if field is None:
                    raise LayoutFormError(
                        f"rank {rank.rank}: the model has no {word} {shard.field!r}",
                        field=shard.field,
                        ranks=rank.rank,
                    )
                if region is None:
                    raise LayoutFormError(
                        f"rank {rank.rank}, field {shard.field}: region {shard.region!r} is not "
                        f"listed",
                        field=shard.field,
                        region=shard.region,
                        ranks=rank.rank,
                    )
                _check_box(rank.rank, shard, field, region)
                lying[shard.region].append((field, shard))
        check_region_use(rank)
        for name, placed in lying.items():
            self._check_page(rank.rank, regions[name], placed)

    def _check_page(self, rank: int, region: Region, lying: list[tuple[Field, Shard]]) -> None:
        """Check everything in a page of a region."""
        form = (
            region.page_stride_bytes,
            tuple((s.offset_bytes, s.dtype, *sizes_and_strides(s, region)) for _, s in lying),
        )
        if form in self._checked:
            return
        for field, shard in lying:
            check_strides(rank, shard, field, region)
        shards = [shard for _, shard in lying]
        self._count_runs(rank, region, shards)
        check_memory(rank, region, shards)
        self._checked.add(form)

    def _count_runs(self, rank: int, region: Region, shards: list[Shard]) -> None:
        for shard in shards:
            sizes, strides = sizes_and_strides(shard, region)
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
    """Return scratch memory as a shard of its own field, so that the checks of shards apply."""
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
            f"and they need it",
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
