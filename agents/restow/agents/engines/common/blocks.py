"""Groups of layers, their block lists, and the position at which a handed-over state stands.

P stops before the tokens that D computes again. D computes the prompt's last token to sample the
next token. Keys and values may be written twice, but a recurrent state must not take the same token
twice (vLLM PR #37310). A sliding window moves too: the window of the prompt's last token begins one
token later than that of the token before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from restow.agents.engines.common.adapter_errors import BlocksError

BlockLists = Mapping[str, Sequence[int]]
"""Block ids by group, in the order of the tokens that they hold."""

NULL_BLOCK = 0
"""The id that stands in a list where a request has no block. It is never read or written."""


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share block lists.

    ``block_tokens`` is at least 1: the tokens of a block, or from one snapshot that other requests
    may find to the next.
    ``scratch_blocks`` None: the blocks hold tokens. Layers with a sliding window keep the last
    ``window_tokens`` (0: all), with ``whole_blocks`` from the beginning of a block.
    Otherwise the blocks hold states, and a request's last ``scratch_blocks`` blocks are for
    speculative tokens.
    """

    name: str
    block_tokens: int
    scratch_blocks: int | None = None
    window_tokens: int = 0
    whole_blocks: bool = False

    @property
    def is_state(self) -> bool:
        """Whether a block holds a snapshot."""
        return self.scratch_blocks is not None

    def first_token(self, position_tokens: int) -> int:
        """Return the first token that a handoff up to a position moves.

        >>> Group("t", 16, None, 31).first_token(57), Group("t", 16, None, 31, True).first_token(57)
        (26, 16)
        """
        if not self.window_tokens:
            return 0
        first = max(position_tokens - self.window_tokens, 0)
        return first - first % self.block_tokens if self.whole_blocks else first


def state_block(group: Group, blocks: Sequence[int]) -> int:
    """Return the block that holds the running state: the last block before the scratch blocks.

    A list that is too short for all scratch blocks has the state in its first block. Raises
    `BlocksError` if no block holds a state.
    """
    scratch = min(group.scratch_blocks or 0, max(len(blocks) - 1, 0))
    block = blocks[len(blocks) - scratch - 1] if blocks else NULL_BLOCK
    if block == NULL_BLOCK:
        raise BlocksError(f"{group.name}: no block holds the state among {list(blocks)}")
    return block


def handoff_blocks(
    groups: Sequence[Group], blocks: Sequence[Sequence[int]]
) -> dict[str, list[int]]:
    """Return the blocks that a handoff names, by group: those of all tokens, or the state's.

    Raises `BlocksError`.
    """
    if len(groups) != len(blocks):
        raise BlocksError(f"the engine gave {len(blocks)} block lists for {len(groups)} groups")
    return {
        group.name: [state_block(group, ids)] if group.is_state else list(ids)
        for group, ids in zip(groups, blocks, strict=True)
    }


@dataclass(frozen=True, slots=True)
class UnwrittenTokens:
    """Tokens ``[start, stop)`` of a block that no handoff writes, counted from its first token."""

    group: str
    block: int
    start: int
    stop: int


def unwritten(
    groups: Sequence[Group], blocks: BlockLists, held_tokens: int, position_tokens: int
) -> list[UnwrittenTokens]:
    """Return the parts of D's blocks that a handoff up to ``position_tokens`` does not write.

    An adapter zeroes them where the engine does not: another layer's state may have lain there,
    and its bytes may be NaN when they are read as keys and values.

    Tokens before ``held_tokens`` are D's own, and tokens before a group's window are not moved.
    Blocks of states have no such parts, because their padding is scratch in the layout.
    """
    parts = []
    for group in groups:
        if group.is_state:
            continue
        size, ids = group.block_tokens, blocks[group.name]
        before = held_tokens, group.first_token(position_tokens)
        for start, stop in (before, (position_tokens, len(ids) * size)):
            for index in range(start // size, -(-stop // size)):
                first, end = max(start - index * size, 0), min(stop - index * size, size)
                if ids[index] != NULL_BLOCK and first < end:
                    parts.append(UnwrittenTokens(group.name, ids[index], first, end))
    return parts


def backoff_tokens(recurrent: bool, windows: bool = False, lookahead_tokens: int = 0) -> int:
    """Return how many tokens at a prompt's end D computes again and P must leave out.

    ``lookahead_tokens``: tokens that a speculative decoder at D writes ahead.
    """
    return max(1 if recurrent or windows else 0, lookahead_tokens - 1)


def position_tokens(prompt_tokens: int, backoff: int) -> int:
    """Return the position of a handed-over prompt's state; 0: there is nothing to hand over.

    >>> position_tokens(100, 1), position_tokens(100, 0), position_tokens(1, 1)
    (99, 100, 0)
    """
    return max(prompt_tokens - backoff, 0)
