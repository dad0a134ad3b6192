"""Stamps: numbers that say who wrote a page, and for what."""

from __future__ import annotations

from stamped.keys import WORD_BYTES


class Violation(AssertionError):
    """A promise was broken."""


class Stamps:
    """Numbers of ``[first, stop)`` that no two writers share, over and over."""

    def __init__(self, first: int = 1, stop: int = 1 << (8 * WORD_BYTES)) -> None:
        self._first, self._stop = first, stop
        self._next = first
        self.revisions: dict[int, str] = {}
        """Which weights have computed a state, by its stamp; those that it began with: left out."""

    def start_at(self, offset: int) -> None:
        """Begin with other stamps than another life did."""
        self._next = self._first + offset % (self._stop - self._first)

    def next(self) -> int:
        stamp = self._next
        self._next = stamp + 1 if stamp + 1 < self._stop else self._first
        return stamp
