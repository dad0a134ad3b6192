"""What a broker may do, as its services ask before they do it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from restow.broker.layout.values import Pool
from restow.broker.server.fleet.report import FleetReport

OWN_S = 3.0
"""How long a call waits at most for a pool that is nobody's yet."""


class Standing(Protocol):
    """Whether pools are this broker's, and whether it may act in them now. On one event loop."""

    @property
    def fleet(self) -> str:
        """The brokers among which it owns pools; epochs of two fleets are not compared."""
        ...

    @property
    def among_others(self) -> bool:
        """Whether there may be other brokers."""
        ...

    def report(self) -> FleetReport | None:
        """How it stands among others; None: it is alone."""
        ...

    def epoch(self, pool: Pool) -> int:
        """The epoch in which it acts in a pool; 0: in none, or where nobody else could."""
        ...

    def check(self, pool: Pool) -> None:
        """Raise `NotOwnerError` or `OwnerUnknownError` unless it owns a pool."""
        ...

    async def own(self, pool: Pool, unreached: str = "", within_s: float = OWN_S) -> None:
        """Claim a pool that is free and its own, and wait for that. Raises as `check` does.

        Who could not reach ``unreached`` is not sent there again at once.
        """
        ...

    def is_sure(self) -> bool:
        """Whether what it owns is certainly its own at this moment."""
        ...

    async def sure(self) -> None:
        """Wait until it is."""
        ...

    def tick(self, now_s: float) -> None:
        """Time has passed, and it is sure."""
        ...


class Alone:
    """The only broker there is: all pools are its own, for ever."""

    fleet = ""
    among_others = False

    def report(self) -> None:
        """Tell nothing: there are no others."""

    def epoch(self, pool: Pool) -> int:
        """Return 0: there is nobody to be told apart from."""
        return 0

    def check(self, pool: Pool) -> None:
        """Take every pool."""

    async def own(self, pool: Pool, unreached: str = "", within_s: float = OWN_S) -> None:
        """Take every pool."""

    def is_sure(self) -> bool:
        """Return True."""
        return True

    async def sure(self) -> None:
        """Return at once."""

    def tick(self, now_s: float) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class Stand:
    """What a broker may do on a stream: it acts there in the epoch in which that was opened."""

    standing: Standing
    pool: Pool
    epoch: int

    @classmethod
    def of(cls, standing: Standing, pool: Pool) -> Stand:
        """The stand of a stream that is opened now."""
        return cls(standing, pool, standing.epoch(pool))

    @property
    def holds_now(self) -> bool:
        """Whether it acts in that epoch still, as far as it knows."""
        return self.standing.epoch(self.pool) == self.epoch

    async def holds(self) -> bool:
        """Wait until the broker is sure; returns whether it acts in that epoch still."""
        if not self.standing.is_sure():
            await self.standing.sure()
        return self.holds_now
