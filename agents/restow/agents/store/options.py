"""A store's options, figures and registered memory."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from restow.agents.memory.regions import RegionMemory, address_of
from restow.agents.store.books.kept import Recomputing
from restow.agents.store.books.room import PageMove, Room

MADV_POPULATE_WRITE = 23
"""Advice of Linux 5.14 and later, for which Python has no name."""


class StoreMemory:
    """Memory of one rank whose regions overlay each other."""

    def __init__(self, room: Room) -> None:
        """Allocate all bytes of ``room`` now, so that no handoff has to wait for them."""
        self._room = room
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._mapping = mmap.mmap(-1, room.size_bytes, flags=flags)
        for advice in (mmap.MADV_HUGEPAGE, MADV_POPULATE_WRITE):
            with contextlib.suppress(OSError):  # the kernel may not know this advice
                self._mapping.madvise(advice)
        self.address = address_of(self._mapping)
        self._bytes = memoryview(self._mapping)

    def regions(self, names: Sequence[str]) -> list[RegionMemory]:
        """Return each group's region, which has the group's name."""
        counts, strides = self._room.page_counts, self._room.strides
        return [RegionMemory(name, self.address, counts[name], strides[name]) for name in names]

    def page(self, group: str, page: int) -> memoryview:
        """Return the bytes of one page, padding included."""
        stride = self._room.strides[group]
        return self._bytes[page * stride : (page + 1) * stride]

    def move(self, moves: Sequence[PageMove]) -> None:
        """Move pages, one after another."""
        for move in moves:
            stride = self._room.strides[move.group]
            target, source = (self.address + page * stride for page in (move.target, move.source))
            ctypes.memmove(target, source, stride)

    def close(self) -> None:
        """Release the memory once no page of it is in use."""
        self._bytes.release()
        try:
            self._mapping.close()
        except BufferError:
            return  # the disk thread still uses a page, and the mapping ends with it


ATTENTION_AT_10_000 = Recomputing(1.0, 1e-4)
"""Costs of a model whose attention outweighs the rest of the model from 10,000 tokens on."""


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """The options of a store.

    ``block_tokens`` None means the smallest block of the layout from which the store is made.
    ``disk`` is a folder, in which states take up to ``disk_bytes``. With None, evicted states are
    gone.
    """

    engine_id: str
    broker: str | None
    memory_bytes: int
    block_tokens: int | None = None
    disk: Path | None = None
    disk_bytes: int = 0
    recomputing: Recomputing = ATTENTION_AT_10_000


@dataclass(frozen=True, slots=True)
class StoreFigures:
    """A store's present content, and counts since its start."""

    states: int
    """States in memory."""
    used_bytes: int
    memory_bytes: int
    evictions: int
    """States evicted from memory."""
    disk_runs: int
    disk_used_bytes: int
    disk_lost: int
    """States that were not written, and runs that could not be read."""
    waiting: int
    """States to request once fewer requests are open."""
    dropped: int
    """States that were never requested, because too many waited."""
    asked: int
    """Requests for states that engines reported as worth keeping."""
    kept: int
    """Requests that brought their state."""
    offered: int
    """Requests for states of the store."""
    given: int
    """Requests that were served."""
    declined: int
    """Requests for states that were gone or unreadable."""
