"""Pages of an engine: those that are free, and what each must hold.

A page that is given back is written anew at once: what is read from it afterwards, or written to
it, is found.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

from stamped.memory import HostMemory, Ids, Written
from stamped.stamps import Stamps, Violation


class Pages:
    """Which pages are free, and what those hold that nobody may be writing to."""

    def __init__(self, memory: HostMemory, stamps: Stamps, rng: Random) -> None:
        self.memory, self._stamps, self._rng = memory, stamps, rng
        self._free = {group: list(range(count)) for group, count in memory.page_counts.items()}
        self._expected: dict[tuple[str, int], Written] = {}
        self._lent: dict[tuple[str, int], Written] = {}
        """What they held when they were lent."""
        self.lost: set[int] = set()
        """The stamps of ranks that lost their memory."""
        for group, pages in self._free.items():
            for page in pages:
                self.write({group: [page]})

    @property
    def all_free(self) -> bool:
        return all(
            len(self._free[group]) == count for group, count in self.memory.page_counts.items()
        )

    def take(self, counts: Mapping[str, int]) -> Ids | None:
        """Take pages for a prompt, if there are enough."""
        if any(len(self._free[group]) < count for group, count in counts.items()):
            return None
        ids: Ids = {}
        for group, count in counts.items():
            self._rng.shuffle(self._free[group])
            ids[group] = [self._free[group].pop() for _ in range(count)]
        return ids

    def lend(self, ids: Ids) -> None:
        """Let others write to these pages from now on."""
        self.check(ids)
        for key in _keys(ids):
            self._lent[key] = self._expected.pop(key)

    def take_back(self, ids: Ids, position_tokens: int) -> set[int]:
        """Return the stamps of what others wrote to lent pages: a state at this position.

        Raises `Violation` if they wrote beside it.
        """
        for group, pages in ids.items():
            for index, page in enumerate(pages):
                before = self._lent.pop((group, page))
                found = self.memory.beside(group, page, before, index, position_tokens)
                if found - {before.stamp} - self.lost:
                    raise Violation(
                        f"{group} page {page}, the {index + 1}. of a state at {position_tokens}, "
                        f"holds {found} instead of {before.stamp} where nothing was to arrive"
                    )
        return self.memory.found(ids, position_tokens)

    def lose(self, rank: int) -> None:
        """Lose a rank's memory: its part of the pages holds nothing of what it held."""
        self.lost.add(stamp := self.stamp())
        for (group, page), before in (*self._expected.items(), *self._lent.items()):
            self.memory.lose(rank, group, page, before, stamp)

    def stamp(self) -> int:
        """Return a stamp for something new."""
        return self._stamps.next()

    def write(self, ids: Ids, stamp: int | None = None) -> int:
        """Use pages for something new, which nobody else may write to; return its stamp."""
        stamp = self.stamp() if stamp is None else stamp
        self.memory.write(ids, stamp)
        for group, pages in ids.items():
            for index, page in enumerate(pages):
                self._expected[group, page] = Written(stamp, index)
        return stamp

    def give(self, ids: Ids) -> None:
        """Give pages back: they are free, and used for something else at once."""
        self.check(ids)
        self.write(ids)
        for group, pages in ids.items():
            self._free[group] += pages

    def check(self, ids: Ids | None = None) -> None:
        """Raise `Violation` if somebody wrote to a page that is not lent."""
        for group, page in list(self._expected) if ids is None else _keys(ids):
            due = self._expected.get((group, page))
            if due is None:
                continue
            found = self.memory.whole(group, page, due)
            if found - {due.stamp} - self.lost:
                raise Violation(f"{group} page {page} holds {found} instead of {due.stamp}")


def _keys(ids: Ids) -> list[tuple[str, int]]:
    return [(group, page) for group, pages in ids.items() for page in pages]
