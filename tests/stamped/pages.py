"""Memory whose pages carry stamps: who wrote a page last is seen from its bytes.

Every word of P's pages of one handoff holds that handoff's stamp, so D's pages must too, whatever
the two layouts are. A page that is given back is stamped anew at once: what is read from it
afterwards, or written to it, is found.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

from restow.agents.memory import RegionMemory
from restow.broker.layout import Layout

WORD_BYTES = 2

Ids = dict[str, list[int]]
Words = npt.NDArray[np.uint16]


class Violation(AssertionError):
    """A promise was broken."""


class Stamps:
    """Numbers of ``[first, stop)`` that no two writers share, over and over."""

    def __init__(self, first: int = 1, stop: int = 1 << (8 * WORD_BYTES)) -> None:
        self._first, self._stop = first, stop
        self._next = first

    def start_at(self, offset: int) -> None:
        """Begin elsewhere, as another life did not."""
        self._next = self._first + offset % (self._stop - self._first)

    def next(self) -> int:
        stamp = self._next
        self._next = stamp + 1 if stamp + 1 < self._stop else self._first
        return stamp


def memory_bytes(layout: Layout, page_counts: Mapping[str, int]) -> int:
    """What `HostMemory` needs."""
    return sum(
        page_counts[region.group] * region.page_stride_bytes
        for rank in layout.ranks
        for region in rank.regions
    )


class HostMemory:
    """The memory of all ranks of an engine, one region after the other."""

    def __init__(
        self, layout: Layout, page_counts: Mapping[str, int], words: Words | None = None
    ) -> None:
        """In ``words`` if given: several processes may share them."""
        self.layout, self.page_counts = layout, dict(page_counts)
        self.regions: dict[int, list[RegionMemory]] = {}
        self._pages: dict[str, list[np.ndarray[Any, Any]]] = {name: [] for name in page_counts}
        if words is None:
            words = np.zeros(memory_bytes(layout, page_counts) // WORD_BYTES, np.uint16)
        self._words, start = words, 0
        for rank in layout.ranks:
            self.regions[rank.rank] = []
            for region in rank.regions:
                count, stride = page_counts[region.group], region.page_stride_bytes
                stop = start + count * stride // WORD_BYTES
                pages = words[start:stop].reshape(count, -1)
                self._pages[region.group].append(pages)
                self.regions[rank.rank].append(
                    RegionMemory(region.name, pages.ctypes.data, count, stride)
                )
                start = stop

    def stamp(self, ids: Ids, stamp: int) -> None:
        """Write pages whole, on all ranks."""
        for group, pages in ids.items():
            for words in self._pages[group]:
                words[pages] = stamp

    def found(self, ids: Ids) -> set[int]:
        """The stamps that pages hold."""
        return {
            stamp
            for group, pages in ids.items()
            for words in self._pages[group]
            for page in pages
            for stamp in _distinct(words[page])
        }


def _distinct(page: Words) -> list[int]:
    raw = page.tobytes()
    # All the same, as nearly all are: bytes say that sooner than numbers.
    if raw[WORD_BYTES:] == raw[:-WORD_BYTES]:
        return [int(page[0])]
    return [int(value) for value in np.unique(page)]


class Pages:
    """Which pages are free, and what those hold that nobody may be writing to."""

    def __init__(self, memory: HostMemory, stamps: Stamps, rng: Random) -> None:
        self.memory, self._stamps, self._rng = memory, stamps, rng
        self._free = {group: list(range(count)) for group, count in memory.page_counts.items()}
        self._expected: dict[tuple[str, int], int] = {}
        for group, pages in self._free.items():
            for page in pages:
                self.settle({group: [page]})

    @property
    def all_free(self) -> bool:
        return all(
            len(self._free[group]) == count for group, count in self.memory.page_counts.items()
        )

    def take(self, counts: Mapping[str, int]) -> Ids | None:
        """Pages for a prompt, if there are enough."""
        if any(len(self._free[group]) < count for group, count in counts.items()):
            return None
        ids: Ids = {}
        for group, count in counts.items():
            self._rng.shuffle(self._free[group])
            ids[group] = [self._free[group].pop() for _ in range(count)]
        return ids

    def lend(self, ids: Ids) -> None:
        """Others may write to these from now on."""
        self.check(ids)
        for group, pages in ids.items():
            for page in pages:
                del self._expected[group, page]

    def settle(self, ids: Ids, stamp: int | None = None) -> None:
        """Nobody else may write to these from now on; without a stamp they get a new one."""
        if stamp is None:
            stamp = self._stamps.next()
            self.memory.stamp(ids, stamp)
        for group, pages in ids.items():
            for page in pages:
                self._expected[group, page] = stamp

    def give(self, ids: Ids) -> None:
        """These are free, and used for something else at once."""
        self.check(ids)
        self.settle(ids)
        for group, pages in ids.items():
            self._free[group] += pages

    def check(self, ids: Ids | None = None) -> None:
        """Raise `Violation` if somebody wrote to a page that is not lent."""
        if ids is None:
            keys = list(self._expected)
        else:
            keys = [(group, page) for group, pages in ids.items() for page in pages]
        for group, page in keys:
            stamp = self._expected.get((group, page))
            if stamp is not None and (found := self.memory.found({group: [page]})) != {stamp}:
                raise Violation(f"{group} page {page} holds {found} instead of {stamp}")
