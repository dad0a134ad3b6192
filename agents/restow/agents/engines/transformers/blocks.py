"""A `BlockPool` knows which blocks of an engine's memory are free."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from random import Random

from restow.agents.engines.common.groups import NULL_BLOCK
from restow.broker.errors import RestowError
from restow.broker.layout import Region


class OutOfBlocksError(RestowError, status="RESOURCE_EXHAUSTED", reason="OUT_OF_BLOCKS"):
    """A prompt needs more blocks than are free."""


class BlockPool:
    """The free blocks of one group, in no order, as after hours of serving. Safe for threads."""

    def __init__(self, region: Region, tokens: int, requests: int, seed: int) -> None:
        """Own the blocks of a region's group: for so many tokens, or requests' states."""
        self._group = region.group
        self._block_tokens = region.page_tokens and region.page_tokens * region.pages_per_block
        self.count = 1 + (-(-tokens // self._block_tokens) if self._block_tokens else requests)
        """Blocks that there are, with the null block."""
        self._lock = threading.Lock()
        self._free = list(range(NULL_BLOCK + 1, self.count))
        Random(seed).shuffle(self._free)  # noqa: S311 - reproducible, not secret

    def take(self, tokens: int) -> list[int]:
        """Take out the blocks of a prompt's tokens, or of its state. Raises `OutOfBlocksError`."""
        count = -(-tokens // self._block_tokens) if self._block_tokens else 1
        with self._lock:
            if count > len(self._free):
                raise OutOfBlocksError(
                    f"group {self._group}: {count} blocks wanted, {len(self._free)} are free",
                    group=self._group,
                )
            taken = self._free[:count]
            del self._free[:count]
        return taken

    def give_back(self, blocks: list[int]) -> None:
        """Put blocks back in."""
        with self._lock:
            self._free.extend(blocks)


def take_from_each(pools: Mapping[str, BlockPool], tokens: int) -> dict[str, list[int]]:
    """Take a prompt's blocks out of every group's pool. Raises `OutOfBlocksError`, taking none."""
    taken: dict[str, list[int]] = {}
    try:
        for group, pool in pools.items():
            taken[group] = pool.take(tokens)
    except OutOfBlocksError:
        for group, blocks in taken.items():
            pools[group].give_back(blocks)
        raise
    return taken
