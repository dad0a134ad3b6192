"""The engine's groups of layers, and which of a request's blocks hold state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from restow.agents.engines.common.errors import BlocksError

NULL_BLOCK = 0
"""vLLM's placeholder: never written, never read (`v1/core/block_pool.py`)."""


@dataclass(frozen=True, slots=True)
class Group:
    """A transfer group: layers that share block lists.

    ``scratch_blocks`` None: its pages hold tokens. Else they hold states, and a request's last
    ``scratch_blocks`` blocks are for speculative tokens.
    """

    name: str
    block_tokens: int
    scratch_blocks: int | None = None

    @property
    def is_state(self) -> bool:
        """Whether a block holds a snapshot."""
        return self.scratch_blocks is not None


def group_name(index: int) -> str:
    """The layout's name of transfer group ``index``."""
    return f"group.{index}"


def state_block(group: Group, blocks: Sequence[int]) -> int:
    """The block that holds the running state: the last one before the scratch.

    As vLLM's `clip_ssm_state_blocks`. Raises `BlocksError` if there is none.
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
