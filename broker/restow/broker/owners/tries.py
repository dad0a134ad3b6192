"""Pools that a member is to claim, and the claims that are under way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from restow.broker.layout.values import Pool


@dataclass(slots=True)
class _Try:
    number: int = 0
    """Of the one under way; 0: none is."""
    next_s: float = 0.0


class Tries:
    """One for each pool at most; each has a number, for an answer counts for its own try alone."""

    def __init__(self) -> None:
        """Nothing is wanted."""
        self._by_pool: dict[Pool, _Try] = {}
        self._last = 0

    def __contains__(self, pool: Pool) -> bool:
        """Whether it is to be claimed."""
        return pool in self._by_pool

    def want(self, pool: Pool) -> None:
        """Have it claimed."""
        self._by_pool.setdefault(pool, _Try())

    def forget(self, pool: Pool) -> None:
        """It is not to be claimed any more. May be repeated."""
        self._by_pool.pop(pool, None)

    def clear(self) -> None:
        """Nothing is to be claimed any more."""
        self._by_pool.clear()

    def due(self, now_s: float) -> Iterator[Pool]:
        """Pools whose claim is not under way, and is to be made now."""
        for pool, one in list(self._by_pool.items()):
            if one.number == 0 and now_s >= one.next_s:
                yield pool

    def begin(self, pool: Pool) -> int:
        """Number a try that begins."""
        self._last += 1
        self._by_pool[pool].number = self._last
        return self._last

    def is_under_way(self, pool: Pool, number: int) -> bool:
        """Whether an answer to the try of that number counts."""
        one = self._by_pool.get(pool)
        return one is not None and one.number == number

    def fail(self, pool: Pool, next_s: float) -> None:
        """Try again later."""
        self._by_pool[pool] = _Try(0, next_s)

    def break_off(self) -> None:
        """What is under way counts no more: the lease that it was made with has ended."""
        for one in self._by_pool.values():
            one.number = 0
