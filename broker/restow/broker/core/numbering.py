"""Handoffs and probes are numbered: each number is unique, and none tells how many there are."""

from __future__ import annotations

PLACES = 12
"""Bits for what begins in one microsecond."""


class Numbering:
    """Gives numbers that grow, each of the moment that it was taken.

    Agents see them: counted one by one, they would tell a tenant how much others do.
    """

    def __init__(self, first_us: int) -> None:
        """Begin at ``first_us``, which keeps the numbers of several lives apart."""
        self._first_us = first_us
        self._last = 0

    def take(self, now_s: float) -> int:
        """A number greater than all before it; an int64 for 35 years."""
        self._last = max(self._last + 1, (self._first_us + int(now_s * 1e6)) << PLACES)
        return self._last
