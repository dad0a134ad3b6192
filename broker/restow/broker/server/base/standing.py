"""Whether this broker may act now, as its services ask before they do something."""

from __future__ import annotations

from dataclasses import dataclass

from restow.broker.errors import RestowError
from restow.broker.registry.leadership import Leadership

LEADERLESS_S = 5.0
"""How long nobody may lead before a broker says that it is not ready."""
LEADER_WAIT_S = 3.0
"""How long a call waits at most for a leader while nobody leads."""


@dataclass(frozen=True, slots=True)
class FleetReport:
    """A broker's report to operators on itself and on the other brokers."""

    leadership: Leadership
    name: str
    now_s: float
    """Time of the report, by the clock of the leadership."""
    expected: int
    """How many brokers there should be; 0: the settings do not say."""
    leaderless_s: float
    """How long nobody has led, as far as this broker knows; 0: somebody leads."""
    trouble: RestowError | None
    """Why the registry's last call failed; None: it did not fail."""
    warnings: tuple[str, ...] = ()
    """Warnings of the registry about itself."""
    terms: int = 0
    """How often this broker has begun to lead."""

    @property
    def brokers(self) -> frozenset[str]:
        """The addresses of all brokers, including this broker."""
        return self.leadership.fleet.brokers | {self.leadership.address}

    @property
    def unready(self) -> str:
        """Why this broker is not ready, in words; empty: it leads or stands by."""
        leadership = self.leadership
        if leadership.lease is None:
            return "not let in by the other brokers' registry"
        if leadership.still_s(self.now_s) is not None:
            return "stands still: its lease may have ended"
        if self.leaderless_s > LEADERLESS_S:
            return "no broker leads"
        return ""


class Standing:
    """Whether this broker leads, and whether it may act now. Belongs to one event loop.

    By itself it is the standing of the only broker, which leads for ever. `OneOfSeveral` has the
    standing of a broker among others.
    """

    fleet = ""
    """The name of the fleet; epochs of two fleets are not compared. Empty: there is none."""
    among_others = False
    """Whether there may be other brokers."""
    term = 1
    """The number of the broker's present term as the leader; 0: it does not lead."""

    @property
    def epoch(self) -> int:
        """The epoch in which the broker leads; 0: it does not lead, or it is the only broker."""
        return 0

    def report(self) -> FleetReport | None:
        """Return the broker's standing among others; None: it is the only broker."""
        return None

    def check(self) -> None:
        """Raise `NotLeaderError` or `NoLeaderError` unless the broker leads."""

    async def lead(self, unreached: str = "", within_s: float = LEADER_WAIT_S) -> None:
        """Wait while nobody leads. Raise as `check` does.

        A caller that could not reach ``unreached`` waits until another broker leads.
        """

    def name_epoch(self, epoch: int) -> None:
        """Take an epoch that an engine or agent names: the broker leads in no lower epoch."""

    def is_sure(self) -> bool:
        """Return whether no other broker can lead now, or this broker does not lead."""
        return True

    async def sure(self) -> None:
        """Wait until `is_sure`."""


@dataclass(frozen=True, slots=True)
class Stand:
    """A broker's right to act on a stream, in the term in which the stream was opened."""

    standing: Standing
    term: int

    @classmethod
    def of(cls, standing: Standing) -> Stand:
        """Return the stand of a stream that is opened now."""
        return cls(standing, standing.term)

    @property
    def holds_now(self) -> bool:
        """Whether the broker still leads in that term, as far as it knows."""
        return self.standing.term == self.term

    async def holds(self) -> bool:
        """Wait until the broker is sure; return whether it still leads in that term."""
        if not self.standing.is_sure():
            await self.standing.sure()
        return self.holds_now
