"""`StoreMemory` is the memory that pages of all groups lie in, each region over all of it."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Sequence

from restow.agents.memory.regions import RegionMemory, address_of
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
