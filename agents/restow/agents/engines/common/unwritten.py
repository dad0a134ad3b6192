"""`unwritten` finds the tokens of loaded blocks that no handoff writes: their bytes are zeroed.

What lay in a block may be another layer's state, which read as keys and values can be NaN. An
engine may leave the blocks that it has loaded to the adapter (vLLM does).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from restow.agents.engines.common.groups import NULL_BLOCK, BlockLists, Group


@dataclass(frozen=True, slots=True)
class UnwrittenTokens:
    """Tokens ``[start, stop)`` of a group's block, counted from the block's first."""

    group: str
    block: int
    start: int
    stop: int


def unwritten(
    groups: Sequence[Group], blocks: BlockLists, held_tokens: int, position_tokens: int
) -> list[UnwrittenTokens]:
    """What a handoff up to ``position_tokens`` leaves out of D's blocks.

    Tokens before ``held_tokens`` are D's own, and what lies before a group's window is not moved.
    Groups of states leave nothing (their padding is scratch in the layout).
    """
    found = []
    for group in groups:
        if group.is_state:
            continue
        size, ids = group.block_tokens, blocks[group.name]
        before = held_tokens, group.first_token(position_tokens)
        for start, stop in (before, (position_tokens, len(ids) * size)):
            for index in range(start // size, -(-stop // size)):
                first, end = max(start - index * size, 0), min(stop - index * size, size)
                if ids[index] != NULL_BLOCK and first < end:
                    found.append(UnwrittenTokens(group.name, ids[index], first, end))
    return found
