"""When to look at a handoff again."""

from __future__ import annotations

import math
from collections import defaultdict


class Deadlines:
    """Numbers in buckets of time: cheap to add, and a stale entry costs one look.

    An entry is due at the end of its bucket, so up to ``bucket_s`` late and never early.
    """

    def __init__(self, bucket_s: float = 0.05) -> None:
        """Start empty."""
        self._bucket_s = bucket_s
        self._buckets: dict[int, list[int]] = defaultdict(list)
        self._next = math.inf

    def add(self, when_s: float, number: int) -> None:
        """Look at ``number`` at ``when_s``."""
        bucket = int(when_s / self._bucket_s) + 1
        self._buckets[bucket].append(number)
        if bucket < self._next:
            self._next = bucket

    def due(self, now_s: float) -> list[int]:
        """Take out all entries that are due."""
        now = now_s / self._bucket_s
        if now < self._next:
            return []
        ripe = sorted(bucket for bucket in self._buckets if bucket <= now)
        numbers = [number for bucket in ripe for number in self._buckets.pop(bucket)]
        self._next = min(self._buckets, default=math.inf)
        return numbers

    def numbers(self) -> set[int]:
        """Everything that will be looked at."""
        return {number for bucket in self._buckets.values() for number in bucket}
