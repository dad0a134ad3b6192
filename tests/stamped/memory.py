"""Memory in which every word says who wrote it, and of which piece of which state it is.

A word is a stamp, one for each use of pages, mixed with the key of its place in the state. So one
stamp comes out of all words that D needs, if they are P's and each lies where it belongs; out of
words of another use, another token, another field or another byte come others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from restow.agents.memory.regions import RegionMemory
from restow.broker.layout import Layout
from stamped.keys import WORD_BYTES, Bools, Keys, Words, keys_of

Ids = dict[str, list[int]]

SHOWN = 5
"""Stamps that are told of what holds many."""


def memory_bytes(layout: Layout, page_counts: Mapping[str, int]) -> int:
    """Return how many bytes `HostMemory` needs."""
    return sum(
        page_counts[region.group] * region.page_stride_bytes
        for rank in layout.ranks
        for region in rank.regions
    )


@dataclass(frozen=True, slots=True)
class Written:
    """What a page holds: of which stamp, and at which index of its list it stood then."""

    stamp: int
    index: int


@dataclass(frozen=True, eq=False)
class _Region:
    layout: Layout
    rank: int
    name: str
    pages: Words
    """``[page, word]``"""

    @cached_property
    def keys(self) -> Keys:
        return keys_of(self.layout, self.rank, self.name, len(self.pages))

    def stamps(self, page: int, index: int, chosen: Bools | None = None) -> set[int]:
        """Return the stamps of a page's words, or of the chosen ones, at this index of a list."""
        found = self.pages[page] ^ self.keys.words[min(index, len(self.keys.words) - 1)]
        if chosen is not None:
            found = found[chosen]
        if not len(found):
            return set()
        # All the same, as nearly all are.
        if (found == found[0]).all():
            return {int(found[0])}
        return {int(stamp) for stamp in np.unique(found)[:SHOWN]}


class HostMemory:
    """The memory of all ranks of an engine, one region after the other."""

    def __init__(
        self, layout: Layout, page_counts: Mapping[str, int], words: Words | None = None
    ) -> None:
        """Lay the memory out in ``words`` if given: several processes may share them."""
        self.layout, self.page_counts = layout, dict(page_counts)
        self.regions: dict[int, list[RegionMemory]] = {}
        self._parts: dict[str, list[_Region]] = {name: [] for name in page_counts}
        self.page_tokens: dict[str, int] = {}
        if words is None:
            words = np.zeros(memory_bytes(layout, page_counts) // WORD_BYTES, np.uint16)
        self._words, start = words, 0
        for rank in layout.ranks:
            self.regions[rank.rank] = []
            for region in rank.regions:
                count, stride = page_counts[region.group], region.page_stride_bytes
                stop = start + count * stride // WORD_BYTES
                pages = words[start:stop].reshape(count, -1)
                self._parts[region.group].append(_Region(layout, rank.rank, region.name, pages))
                self.page_tokens[region.group] = region.page_tokens or 0
                self.regions[rank.rank].append(
                    RegionMemory(region.name, pages.ctypes.data, count, stride)
                )
                start = stop

    def counts(self, position_tokens: int) -> dict[str, int]:
        """Return how many pages of each group a state at this position takes."""
        return {
            group: -(-position_tokens // tokens) if tokens else 1
            for group, tokens in self.page_tokens.items()
        }

    def holding(self, ids: Ids, tokens: int) -> Ids:
        """Return the pages of a state that hold its leading tokens."""
        return {
            group: pages[: -(-tokens // self.page_tokens[group])]
            for group, pages in ids.items()
            if self.page_tokens[group]
        }

    def write(self, ids: Ids, stamp: int) -> None:
        """Write whole pages on all ranks, each as its place in its list says."""
        for group, pages in ids.items():
            for part in self._parts[group]:
                part.pages[pages] = part.keys.words[: len(pages)] ^ np.uint16(stamp)

    def lose(self, rank: int, group: str, page: int, before: Written, stamp: int) -> None:
        """Write a rank's part of pages anew, as another process has it."""
        for part in self._parts[group]:
            if part.rank == rank:
                index = min(before.index, len(part.keys.words) - 1)
                part.pages[page] = part.keys.words[index] ^ np.uint16(stamp)

    def found(self, ids: Ids, position_tokens: int) -> set[int]:
        """Return the stamps of all that belongs to a state at this position; one if it is whole."""
        return {
            stamp
            for group, pages in ids.items()
            for part in self._parts[group]
            for index, page in enumerate(pages)
            for stamp in part.stamps(page, index, part.keys.needed(index, position_tokens))
        }

    def whole(self, group: str, page: int, before: Written) -> set[int]:
        """Return the stamps of all words of a page, which were written at once."""
        return {stamp for part in self._parts[group] for stamp in part.stamps(page, before.index)}

    def beside(
        self, group: str, page: int, before: Written, index: int, position_tokens: int
    ) -> set[int]:
        """Return the stamps of a page's words that no state needs at this index of its list."""
        return {
            stamp
            for part in self._parts[group]
            for stamp in part.stamps(page, before.index, ~part.keys.needed(index, position_tokens))
        }
