"""Of one rank: does every shard speak of what there is, and does each page hold its shards?"""

from __future__ import annotations

from collections import defaultdict

from restow.broker.errors import LayoutFormError
from restow.broker.layout.check.inputs import weights_as_shard
from restow.broker.layout.check.regions import check_region_use, check_regions
from restow.broker.layout.check.strides import check_memory, check_strides, sizes_and_strides
from restow.broker.layout.limits import MAX_AXES, MAX_PAGE_BYTES, MAX_RUNS
from restow.broker.layout.rows import count_rows
from restow.broker.layout.span import Span
from restow.broker.layout.values import Field, Kind, Model, RankLayout, Region, Scratch, Shard


class PageChecker:
    """Checks the ranks of one layout; pages of equal form are looked at once."""

    def __init__(self, model: Model) -> None:
        """Start with nothing checked."""
        self._fields = {field.name: field for field in model.fields}
        self._inputs = {field.name: field for field in model.inputs}
        self._checked: set[object] = set()
        self._runs = 0

    def check(self, rank: RankLayout) -> None:
        """Raise `LayoutFormError`, `LayoutStrideError` or `LayoutMemoryError`; else return."""
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
        for name, found in lying.items():
            self._check_page(rank.rank, regions[name], found)

    def _check_page(self, rank: int, region: Region, lying: list[tuple[Field, Shard]]) -> None:
        """Of all that lies in a page of a region."""
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
