"""Fences of handoffs that nobody has published yet: a rank may be quicker than its scheduler."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from restow.broker.errors import DirectoryFullError

MAX_FENCES = 1 << 16


class EarlyFences:
    """Those of one engine, by handoff. They are no handoffs yet, and count as none."""

    def __init__(self) -> None:
        """None yet."""
        self._fences: OrderedDict[str, tuple[float, set[int]]] = OrderedDict()

    def __len__(self) -> int:
        """Of how many handoffs there are any."""
        return len(self._fences)

    def add(self, handoff_id: str, rank: int, until_s: float) -> None:
        """Keep that a rank has fenced; the first one says until when.

        Raises `DirectoryFullError`.
        """
        known = self._fences.get(handoff_id)
        if known is not None:
            known[1].add(rank)
            return
        if len(self._fences) >= MAX_FENCES:
            raise DirectoryFullError(
                f"{MAX_FENCES} handoffs are fenced and not published: publish before fencing, or "
                f"soon after"
            )
        self._fences[handoff_id] = (until_s, {rank})

    def take(self, handoff_id: str) -> set[int]:
        """The ranks that have fenced a handoff that is published now."""
        return self._fences.pop(handoff_id, (0.0, set()))[1]

    def forget_rank(self, rank: int) -> None:
        """A rank's agent is gone, and what it had in memory with it."""
        for handoff_id, (_, ranks) in list(self._fences.items()):
            ranks.discard(rank)
            if not ranks:
                del self._fences[handoff_id]

    def expired(self, now_s: float) -> Iterator[tuple[str, set[int]]]:
        """Take out those that were never published: the handoff and the ranks of each."""
        while self._fences:
            handoff_id, (until_s, ranks) = next(iter(self._fences.items()))
            if until_s > now_s:
                return
            del self._fences[handoff_id]
            yield handoff_id, ranks
