"""A layout in a few numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from restow.broker.layout.names import field_class
from restow.broker.layout.span import volume
from restow.broker.layout.values import Layout, Model, RankLayout


@dataclass(frozen=True, slots=True)
class RankSummary:
    """What one rank holds: for each token, in each snapshot, and what its pages leave unused.

    Where ranks share tokens out: for each token that is its own.
    """

    rank: int
    regions: int
    shards: int
    bytes_per_token: int
    bytes_per_snapshot: int
    padding_bytes: int
    """Of one page of every region together."""
    bytes_of_inputs: int = 0
    """Mixer inputs that it keeps beside a snapshot."""
    bytes_of_weights: int = 0
    """Weights that it offers for rebuilding conv windows."""


def summarize(rank: RankLayout) -> RankSummary:
    """The summary of one rank of a checked layout."""
    tokens_of = {region.name: region.page_tokens for region in rank.regions}
    per_token = per_snapshot = used = 0
    for shard in rank.shards:
        size = volume(shard.box) * shard.dtype.itemsize_bytes
        tokens = tokens_of[shard.region]
        used += size * (tokens or 1)
        if tokens is None:
            per_snapshot += size
        else:
            per_token += size
    used += sum(math.prod(s.sizes) * s.dtype.itemsize_bytes for s in rank.scratch)
    inputs = sum(volume(shard.box) * shard.dtype.itemsize_bytes for shard in rank.inputs)
    weights = sum(region.page_stride_bytes for region in rank.regions if region.constant)
    used += inputs + weights
    pages = sum(region.page_stride_bytes for region in rank.regions)
    counts = len(rank.regions), len(rank.shards)
    return RankSummary(rank.rank, *counts, per_token, per_snapshot, pages - used, inputs, weights)


def shared_tokens(layout: Layout) -> dict[str, tuple[int, int]]:
    """The groups whose tokens ranks share out: in how many parts, and how many tokens in turn."""
    return {
        region.group: (region.context_parts, region.interleave_tokens)
        for rank in layout.ranks
        for region in rank.regions
        if region.context_parts > 1
    }


def scaled_fields(model: Model) -> dict[str, list[str]]:
    """The scales that elements have, each with its fields' names without their layers."""
    found: dict[str, list[str]] = {}
    for field in model.fields:
        name = field_class(field.name)
        if field.scales and name not in found.setdefault(field.scales, []):
            found[field.scales].append(name)
    return found
