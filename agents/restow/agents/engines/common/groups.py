"""A `Group` of layers shares lists of blocks; `handoff_blocks` says which of them hold state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from restow.agents.engines.common.errors import BlocksError

BlockLists = Mapping[str, Sequence[int]]
"""Block ids by group, in the order of the tokens that they hold."""

NULL_BLOCK = 0
"""The id in a list where a request has no block: it is never written, never read, never given
out."""


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share block lists.

    ``scratch_blocks`` None: its blocks hold tokens, of which layers with a sliding window keep the
    last ``window_tokens`` (0: all), with ``whole_blocks`` from the beginning of a block. Else they
    hold states, and a request's last ``scratch_blocks`` blocks are for speculative tokens.
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
        """Where the tokens begin that a handoff up to a position moves.

        >>> Group("t", 16, None, 31).first_token(57), Group("t", 16, None, 31, True).first_token(57)
        (26, 16)
        """
        if not self.window_tokens:
            return 0
        first = max(position_tokens - self.window_tokens, 0)
        return first - first % self.block_tokens if self.whole_blocks else first


def state_block(group: Group, blocks: Sequence[int]) -> int:
    """The block that holds the running state: the last one before the scratch.

    A list that is too short for all of the scratch has it in its first block. Raises `BlocksError`
    if there is none.
    """
    scratch = min(group.scratch_blocks or 0, max(len(blocks) - 1, 0))
    found = blocks[len(blocks) - scratch - 1] if blocks else NULL_BLOCK
    if found == NULL_BLOCK:
        raise BlocksError(f"{group.name}: no block holds the state among {list(blocks)}")
    return found


def handoff_blocks(
    groups: Sequence[Group], blocks: Sequence[Sequence[int]]
) -> dict[str, list[int]]:
    """By group, what a handoff names: all blocks from token 0 on, or the one of the state.

    Raises `BlocksError`.
    """
    if len(groups) != len(blocks):
        raise BlocksError(f"{len(blocks)} block lists for {len(groups)} groups")
    return {
        group.name: [state_block(group, some)] if group.is_state else list(some)
        for group, some in zip(groups, blocks, strict=True)
    }
