"""Fences that were said, to be said again to one who forgot them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

MAX_FENCES = 4096
KEPT_S = 60.0


class RecentFences:
    """The fences of the last minute, for that is how long a lease commonly lasts; bounded."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """None yet."""
        self._clock = clock
        self._fences: deque[tuple[float, str]] = deque(maxlen=MAX_FENCES)

    def add(self, handoff_id: str) -> None:
        """Keep one more."""
        self._fences.append((self._clock(), handoff_id))

    def recent(self) -> list[str]:
        """Ids of the handoffs, oldest first."""
        oldest_s = self._clock() - KEPT_S
        while self._fences and self._fences[0][0] < oldest_s:
            self._fences.popleft()
        return [handoff_id for _, handoff_id in self._fences]
