"""`check_whole_blocks` refuses a D that keeps blocks of which P may lack the beginning."""

from __future__ import annotations

from collections.abc import Iterator

from restow.broker.errors import BlockTokensMismatchError
from restow.broker.layout import Layout, Region


def check_whole_blocks(source: Layout, destination: Layout) -> None:
    """Raise `BlockTokensMismatchError` unless a block of P begins where each of D's does.

    P frees the blocks that lie wholly before a window: it still has the one that the window begins
    in, and D's block of that token must begin in that one or behind.
    """
    windows = {one.name for one in source.model.fields if one.window_tokens}
    wanted = {(f, r.block_tokens) for f, r in _held(destination) if f in windows and r.whole_blocks}
    if not wanted:
        return
    held = {(field, region.block_tokens) for field, region in _held(source) if field in windows}
    for field, theirs in sorted(wanted):
        for ours in sorted(tokens for name, tokens in held if name == field):
            if ours % theirs:
                raise BlockTokensMismatchError(
                    f"field {field}: D keeps whole blocks of {theirs} tokens for other prompts, "
                    f"and P frees what lies before a window in blocks of {ours}, no multiple of "
                    f"that: P may lack what D's block begins with. Give D blocks that divide P's, "
                    f"or have it keep none (vLLM: --no-enable-prefix-caching)",
                    field=field,
                    source=ours,
                    destination=theirs,
                )


def _held(layout: Layout) -> Iterator[tuple[str, Region]]:
    """Yield each field that a rank holds, with the region that it lies in."""
    for rank in layout.ranks:
        regions = {region.name: region for region in rank.regions}
        for shard in rank.shards:
            yield shard.field, regions[shard.region]
