"""How long to wait before the next try."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable

FIRST_S = 0.1
LAST_S = 5.0
JITTER = 0.5
LONGEST_S = LAST_S * (1 + JITTER)
HELD_S = 1.0
"""What held so long has worked: a wire that breaks every few seconds is to be used between."""


class Backoff:
    """Doubling waits with jitter, so that those who lost one broker do not return as one.

    They begin anew when what was tried has worked for ``HELD_S``.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin with the shortest wait."""
        self._clock = clock
        self._next_s = FIRST_S
        self._works_since_s = math.inf

    def began(self) -> None:
        """What is tried has begun to work."""
        self._works_since_s = self._clock()

    def wait_s(self) -> float:
        """Seconds to wait now: what was tried works no more."""
        if self._clock() - self._works_since_s >= HELD_S:
            self._next_s = FIRST_S
        self._works_since_s = math.inf
        wait_s = self._next_s * random.uniform(1 - JITTER, 1 + JITTER)  # noqa: S311 - no secret
        self._next_s = min(2 * self._next_s, LAST_S)
        return wait_s
