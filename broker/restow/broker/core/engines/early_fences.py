"""Fences of handoffs that nobody has published yet: a rank may be quicker than its scheduler."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from restow.broker.core.engines.account import FENCE_BYTES, Account
from restow.broker.errors import DirectoryFullError
from restow.broker.text_bytes import text_bytes

MAX_FENCES = 1 << 16


class EarlyFences:
    """Those of one engine, by handoff. They are no handoffs yet, and count as none."""

    def __init__(self, account: Account) -> None:
        """None yet; their ids count in the tenant's ``account``."""
        self._account = account
        self._fences: OrderedDict[str, tuple[float, set[int]]] = OrderedDict()

    def __len__(self) -> int:
        """Of how many handoffs there are any."""
        return len(self._fences)

    def __contains__(self, handoff_id: str) -> bool:
        """Whether a rank has fenced the handoff."""
        return handoff_id in self._fences

    def add(self, handoff_id: str, rank: int, until_s: float) -> None:
        """Keep that a rank has fenced; the first one says until when.

        Raises `DirectoryFullError`, and `QuotaExceededError` for the bytes of ids.
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
        self._account.keep(_bytes_of(handoff_id))
        self._fences[handoff_id] = (until_s, {rank})

    def take(self, handoff_id: str) -> set[int]:
        """The ranks that have fenced a handoff that is published now, or of none any more."""
        known = self._fences.pop(handoff_id, None)
        if known is None:
            return set()
        self._account.let_go(_bytes_of(handoff_id))
        return known[1]

    def forget(self) -> None:
        """The engine is gone."""
        for _ in self.take_all():
            pass

    def take_all(self) -> Iterator[tuple[str, set[int]]]:
        """Take all out: the handoff and the ranks of each."""
        for handoff_id in list(self._fences):
            yield handoff_id, self.take(handoff_id)

    @property
    def size_bytes(self) -> int:
        """What they count in the account."""
        return sum(map(_bytes_of, self._fences))

    def forget_rank(self, rank: int) -> None:
        """A rank's agent is gone, and what it had in memory with it."""
        for handoff_id, (_, ranks) in list(self._fences.items()):
            ranks.discard(rank)
            if not ranks:
                self.take(handoff_id)

    def expired(self, now_s: float) -> Iterator[tuple[str, set[int]]]:
        """Take out those that were never published: the handoff and the ranks of each."""
        while self._fences:
            handoff_id, (until_s, ranks) = next(iter(self._fences.items()))
            if until_s > now_s:
                return
            self.take(handoff_id)
            yield handoff_id, ranks


def _bytes_of(handoff_id: str) -> int:
    return FENCE_BYTES + text_bytes(handoff_id)
