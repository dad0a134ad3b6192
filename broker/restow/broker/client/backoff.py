"""How long to wait before the next try."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

FIRST_S = 0.1
LAST_S = 5.0
JITTER = 0.5
LONGEST_S = LAST_S * (1 + JITTER)


class Backoff:
    """Doubling waits with jitter, so that those who lost one broker do not return as one.

    What held for ``LAST_S`` or longer counts as well, and the waits begin anew.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin with the shortest wait."""
        self._clock = clock
        self._next_s = FIRST_S
        self._began_s = clock()

    def began(self) -> None:
        """What is tried has begun to work."""
        self._began_s = self._clock()

    def wait_s(self) -> float:
        """Seconds to wait now."""
        if self._clock() - self._began_s >= LAST_S:
            self._next_s = FIRST_S
        wait_s = self._next_s * random.uniform(1 - JITTER, 1 + JITTER)  # noqa: S311 - no secret
        self._next_s = min(2 * self._next_s, LAST_S)
        self._began_s = self._clock() + wait_s
        return wait_s
