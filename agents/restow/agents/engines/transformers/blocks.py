"""Which blocks of an engine's memory are free."""

from __future__ import annotations

import threading
from random import Random

from restow.broker.errors import RestowError

NULL_BLOCK = 0
"""Never given out: engines keep it for positions that hold nothing (vLLM `block_pool.py`)."""


class OutOfBlocksError(RestowError):
    """A prompt needs more blocks than are free."""

    status = "RESOURCE_EXHAUSTED"
    reason = "OUT_OF_BLOCKS"


class BlockPool:
    """The free blocks of one group, in no order, as after hours of serving. Safe for threads."""

    def __init__(self, group: str, count: int, seed: int) -> None:
        """Own the blocks ``1 .. count - 1``."""
        self._group = group
        self._lock = threading.Lock()
        self._free = list(range(NULL_BLOCK + 1, count))
        Random(seed).shuffle(self._free)  # noqa: S311 - reproducible, not secret

    def take(self, count: int) -> list[int]:
        """Take blocks out. Raises `OutOfBlocksError`."""
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
