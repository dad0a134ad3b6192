"""`join_layers` puts the pages of all layers of a group side by side into one region's pages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

from restow.broker.layout import RankLayout, Region, Scratch, Shard

Placed = TypeVar("Placed", Shard, Scratch)


def join_layers(rank: RankLayout) -> RankLayout:
    """Return the rank's layout with one region a group, of which a page has those of all layers.

    They lie in the order of the layers, each with its own padding (vLLM's cross-layer blocks).
    Constant regions stay as they are.
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
    for one in placed:
        region, start = begins[one.region]
        yield replace(one, region=region, offset_bytes=one.offset_bytes + start)
