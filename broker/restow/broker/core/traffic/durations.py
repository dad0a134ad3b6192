"""Durations in a few numbers, of which quantiles are known to within a tenth."""

from __future__ import annotations

import math
from array import array
from itertools import accumulate
from typing import Final

SHORTEST_S: Final = 1e-4
PER_OCTAVE: Final = 4
SLOTS: Final = 96
"""Up to 23 minutes; what lasts longer is in the last one."""


def slot_of(seconds: float) -> int:
    """Where a duration is counted."""
    if seconds <= SHORTEST_S:
        return 0
    return min(SLOTS - 1, math.ceil(math.log2(seconds / SHORTEST_S) * PER_OCTAVE))


class QuantileCounts:
    """A histogram whose bounds grow by the same factor. Its size does not depend on what is said.

    Slot 0 has durations up to `SHORTEST_S`, slot k those up to ``SHORTEST_S * 2**(k/PER_OCTAVE)``.
    """

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        """Nothing is counted."""
        self._counts = array("I", bytes(SLOTS * 4))

    def add(self, slot: int) -> None:
        """Count one, whose `slot_of` it is."""
        self._counts[slot] += 1

    def add_all(self, other: QuantileCounts) -> None:
        """Count what ``other`` counted."""
        counts = self._counts
        for slot, count in enumerate(other._counts):
            if count:
                counts[slot] += count

    def take_away(self, other: QuantileCounts) -> None:
        """Count no more what ``other`` counted, which was counted here as well."""
        counts = self._counts
        for slot, count in enumerate(other._counts):
            if count:
                counts[slot] -= count

    def quantile(self, share: float) -> float | None:
        """The duration in seconds that ``share`` of all do not exceed; None: nothing is counted.

        >>> found = QuantileCounts()
        >>> for ms in range(1, 1001):
        ...     found.add(slot_of(ms / 1000))
        >>> round(found.quantile(0.5), 2), round(found.quantile(0.99), 2)
        (0.53, 1.06)
        """
        upto = list(accumulate(self._counts))
        if not upto[-1]:
            return None
        # That of the nearest rank; half a count off keeps rounding from going one rank further.
        wanted = share * upto[-1] - 0.5
        slot = next(at for at, count in enumerate(upto) if count >= wanted and count)
        return SHORTEST_S * 2 ** (max(slot - 0.5, 0) / PER_OCTAVE)
