"""`StoreMemory` is the memory that pages of all groups lie in, each region over all of it."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

from restow.agents.memory.regions import RegionMemory, address_of
from restow.agents.store.room import PageMove, Room


class StoreMemory:
    """Memory of one rank whose regions overlay each other."""

    def __init__(self, room: Room) -> None:
        """Have as many bytes as ``room`` cuts up; the system gives them when they are used."""
        self._room = room
        self._mapping = mmap.mmap(-1, room.size_bytes)
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
