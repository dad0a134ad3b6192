"""A series: the last quarter of an hour in steps of equal length, in a ring that does not grow."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Final

from restow.broker.core.traffic.tally import End, Tally

KEPT_S: Final = 900.0
"""How far back a series goes."""


class Series:
    """Tallies of the latest steps, and of all of them together. Steps of no end take no room.

    Every end is counted here, so it goes into one tally at first, and from that into both when the
    step is over or somebody looks.
    """

    def __init__(self, step_s: float) -> None:
        """Nothing has ended. ``step_s`` divides `KEPT_S`."""
        self.step_s = step_s
        self.steps = round(KEPT_S / step_s)
        self._tallies: OrderedDict[int, Tally] = OrderedDict()
        self._whole = Tally()
        self._fresh = Tally()
        """Of the step that ends at ``_fresh_until_s``, and in no other tally yet."""
        self._fresh_step = 0
        self._fresh_until_s = -math.inf

    def count(self, end: End, now_s: float) -> None:
        """Count one that ends now."""
        if now_s >= self._fresh_until_s:
            self._fresh_step = self._forget(now_s)
            self._fresh_until_s = (self._fresh_step + 1) * self.step_s
        self._fresh.count(end)

    def whole(self, now_s: float) -> Tally:
        """All steps together, to look at."""
        self._forget(now_s)
        return self._whole

    def latest(self, now_s: float, since_s: float = 0.0) -> list[Tally]:
        """One tally for each step since then, the oldest first, to look at.

        As many as are kept; the last step is under way.
        """
        step = self._forget(now_s)
        first = max(step - self.steps + 1, int(since_s // self.step_s))
        nothing = Tally()
        return [self._tallies.get(at, nothing) for at in range(first, step + 1)]

    def _forget(self, now_s: float) -> int:
        """The step that is now; those that are too old for the ring are forgotten."""
        if self._fresh.ended:
            self._tallies.setdefault(self._fresh_step, Tally()).add(self._fresh)
            self._whole.add(self._fresh)
            self._fresh = Tally()
        step = int(now_s // self.step_s)
        while self._tallies:
            oldest = next(iter(self._tallies))
            if oldest > step - self.steps:
                break
            self._whole.take_away(self._tallies.pop(oldest))
        # A clock that is set back must not open a step behind the latest.
        return max(step, next(reversed(self._tallies), step))
