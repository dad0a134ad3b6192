"""A series: the last quarter of an hour in steps of equal length, in a ring that does not grow."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from restow.broker.core.traffic.tally import End, Tally

KEPT_S: Final = 900.0
"""How far back a series goes."""


class Series:
    """Tallies of the latest steps, and of all of them together. Steps of no end take no room."""

    def __init__(self, step_s: float) -> None:
        """Nothing has ended. ``step_s`` divides `KEPT_S`."""
        self.step_s = step_s
        self.steps = round(KEPT_S / step_s)
        self._tallies: OrderedDict[int, Tally] = OrderedDict()
        self._whole = Tally()

    def count(self, end: End, now_s: float) -> None:
        """Count one that ends now."""
        step = self._forget(now_s)
        tally = self._tallies.get(step)
        if tally is None:
            tally = self._tallies[step] = Tally()
        tally.count(end)
        self._whole.count(end)

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
        step = int(now_s // self.step_s)
        while self._tallies:
            oldest = next(iter(self._tallies))
            if oldest > step - self.steps:
                break
            self._whole.take_away(self._tallies.pop(oldest))
        # A clock that is set back must not open a step behind the latest.
        return max(step, next(reversed(self._tallies), step))
