"""What a store is given: its options, and the memory that it registers."""

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
"""Of Linux, from 5.14 on; Python has no name for it."""


class StoreMemory:
    """Memory of one rank whose regions overlay each other."""

    def __init__(self, room: Room) -> None:
        """Take as many bytes as ``room`` cuts up, now: a handoff need not wait for them."""
        self._room = room
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._mapping = mmap.mmap(-1, room.size_bytes, flags=flags)
        for advice in (mmap.MADV_HUGEPAGE, MADV_POPULATE_WRITE):
            with contextlib.suppress(OSError):  # a system that knows no such advice
                self._mapping.madvise(advice)
        self.address = address_of(self._mapping)
        self._bytes = memoryview(self._mapping)

    def regions(self, names: Sequence[str]) -> list[RegionMemory]:
        """Each group's region, which has its name."""
        counts, strides = self._room.page_counts, self._room.strides
        return [RegionMemory(name, self.address, counts[name], strides[name]) for name in names]

    def page(self, group: str, page: int) -> memoryview:
        """The bytes of one page, padding included."""
        stride = self._room.strides[group]
        return self._bytes[page * stride : (page + 1) * stride]

    def move(self, moves: Sequence[PageMove]) -> None:
        """Move pages, one after the other."""
        for one in moves:
            stride = self._room.strides[one.group]
            target, source = (self.address + page * stride for page in (one.target, one.source))
            ctypes.memmove(target, source, stride)

    def close(self) -> None:
        """Give the memory back, as soon as nobody has a page of it."""
        self._bytes.release()
        try:
            self._mapping.close()
        except BufferError:
            return  # a page is read or written by a disk: the mapping ends with it


ATTENTION_AT_10_000 = Recomputing(1.0, 1e-4)
"""From 10,000 tokens on attention costs more than the rest of the model."""


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """How a store is run.

    ``block_tokens`` None: as few as any block of the layout that it is made from. ``disk`` is a
    folder, of which states take up to ``disk_bytes``; None: what is evicted is gone.
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
    """What a store has at the moment, and what it has done since it started."""

    states: int
    """In memory."""
    used_bytes: int
    memory_bytes: int
    evictions: int
    """States that others took the place of, in memory."""
    disk_runs: int
    disk_used_bytes: int
    disk_lost: int
    """States that were not written, and runs that could not be read."""
    waiting: int
    """States to be asked for, as soon as fewer are on their way."""
    dropped: int
    """Those that waited in vain, because too many did."""
    asked: int
    """Demands for states that engines said are worth keeping."""
    kept: int
    """Those of them whose states came."""
    offered: int
    """States that were asked for."""
    given: int
    """Those of them that D has."""
    declined: int
    """Those of them that were not there, or could not be read."""
