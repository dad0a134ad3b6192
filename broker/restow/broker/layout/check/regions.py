"""Of one region: are its numbers such that pages can be counted, and is what it holds allowed?"""

from __future__ import annotations

from restow.broker.errors import LayoutFormError
from restow.broker.layout.limits import (
    MAX_BLOCK,
    MAX_PAGE_BYTES,
    MAX_PAGES_PER_BLOCK,
    MAX_RANKS,
    MAX_TOKENS,
)
from restow.broker.layout.values import RankLayout, Region


def check_regions(rank: RankLayout) -> None:
    """Raise `LayoutFormError` for a number out of its bounds."""
    for region in rank.regions:
        if wrong := _wrong(region):
            raise _error(rank, region, wrong)


def check_region_use(rank: RankLayout) -> None:
    """Raise `LayoutFormError` for a constant region with anything but weights in it."""
    used = {shard.region for shard in (*rank.shards, *rank.inputs)}
    used |= {scratch.region for scratch in rank.scratch}
    for region in rank.regions:
        if region.constant and (region.page_tokens is not None or region.name in used):
            raise _error(
                rank,
                region,
                "without a group it is constant and holds weights of projections and nothing else, "
                "no tokens either",
            )


def _wrong(region: Region) -> str:
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
    return _wrong_tokens(region)


def _wrong_tokens(region: Region) -> str:
    """Why its pages can't hold the tokens that it says, or nothing."""
    parts, part, run = region.context_parts, region.context_part, region.interleave_tokens
    if not 0 < parts <= MAX_RANKS or not 0 <= part < parts:
        return f"context_part is {part} of {parts}; there may be 1 to {MAX_RANKS}, numbered from 0"
    if parts == 1:
        return f"interleave_tokens is {run}, but there is one context part" if run != 1 else ""
    if region.page_tokens is None:
        return f"context_parts is {parts}, but only tokens are cut over ranks"
    held = region.page_tokens * region.pages_per_block
    if run < 1 or held % run:
        return f"interleave_tokens is {run}; it must divide the {held} tokens of a block"
    return ""


def _error(rank: RankLayout, region: Region, wrong: str) -> LayoutFormError:
    return LayoutFormError(
        f"rank {rank.rank}, region {region.name}: {wrong}", ranks=rank.rank, region=region.name
    )
