"""Rules by which a broker leads. They do no I/O: they take events with a time, and say what to do.

    outside --joined--> standby --leads--> leader --released, lost, in doubt too long--> standby

Laws:
- A broker leads only when the answer to its own call says so, never because it reads that it leads.
- It stops acting a margin before the end of its lease, counted from when it sent the last keepalive
  that was answered. From then on its lease is in doubt: the broker stands still, and goes on if the
  lease turns out to live.
- It stops leading when it sees another leader, when its lease has ended, or when its lease should
  have ended some time ago.
- Its epoch is higher than any epoch that the registry, an engine or an agent has named. When
  somebody names a higher epoch later, as after a registry was restored from a backup, the broker
  raises its epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from restow.broker.registry.registry import Fleet, Leader, Timing


class Want(Enum):
    """What a broker asks the registry for next."""

    NOTHING = "nothing"
    LEAD = "lead"
    RAISE = "raise"
    """Raise its epoch above an epoch that somebody has named."""
    RELEASE = "release"


@dataclass(frozen=True, slots=True)
class BrokerLease:
    """A broker's lease, by its own clock."""

    length_s: float
    sent_s: float
    """When the last answered keepalive was sent. The lease began no earlier."""

    @property
    def end_s(self) -> float:
        """The earliest moment at which the lease may end."""
        return self.sent_s + self.length_s


class Leadership:
    """Whether a broker leads, and whether it may act now."""

    def __init__(self, address: str, timing: Timing) -> None:
        """Begin outside of the fleet."""
        self.address, self.timing = address, timing
        self.lease: BrokerLease | None = None
        self.epoch = 0
        """The epoch in which this broker leads; 0: it does not lead."""
        self.fleet = Fleet(None, frozenset())
        """The last answer of the registry."""
        self._named = 0
        """The highest epoch that anybody has named."""
        self.leaving = False
        """Whether the broker is about to end."""

    # -- questions before the broker acts ---------------------------------------------------------

    def may_act(self, now_s: float) -> bool:
        """Return whether the broker leads and no other broker can."""
        lease = self.lease
        return bool(self.epoch) and lease is not None and now_s < lease.end_s - self.timing.margin_s

    def still_s(self, now_s: float) -> float | None:
        """Return how long the lease has been in doubt. None: it is not in doubt."""
        if self.lease is None:
            return None
        doubt_s = now_s - (self.lease.end_s - self.timing.margin_s)
        return doubt_s if doubt_s >= 0 else None

    @property
    def leader(self) -> str:
        """The address of the leader, as far as this broker knows. Empty: nobody leads."""
        if self.epoch:
            return self.address
        leader = self.fleet.leader
        return "" if leader is None or leader.mine else leader.address

    # -- events -----------------------------------------------------------------------------------

    def kept(self, sent_s: float, length_s: float) -> None:
        """Note that the lease was renewed. Answers may arrive in any order."""
        if self.lease is None or sent_s > self.lease.sent_s:
            self.lease = BrokerLease(length_s, sent_s)

    def lost(self) -> None:
        """Note that the lease has ended."""
        self.lease, self.epoch = None, 0

    def saw(self, fleet: Fleet) -> None:
        """Take an answer of the registry. This broker stops leading if it is not named there."""
        self.fleet = fleet
        self.named(fleet.epoch)
        leader = fleet.leader
        if leader is None or not leader.mine or leader.epoch != self.epoch:
            self.epoch = 0

    def named(self, epoch: int) -> None:
        """Take an epoch that an engine, an agent or the registry names."""
        self._named = max(self._named, epoch)

    def led(self, leader: Leader) -> None:
        """Take the answer to a call to lead, or to raise the epoch."""
        self.fleet = Fleet(leader, self.fleet.brokers | {leader.address}, leader.epoch)
        self.named(leader.epoch)
        acts = leader.mine and self.lease is not None and not self.leaving
        self.epoch = leader.epoch if acts else 0

    def leave(self) -> None:
        """Stop acting, and never lead again, because the broker is about to end.

        Another broker may lead as soon as the registry has heard, before this broker gets
        an answer.
        """
        self.leaving = True
        self.epoch = 0

    def released(self) -> None:
        """Note that the registry no longer names this broker as the leader."""
        if self._holds:
            self.fleet = Fleet(None, self.fleet.brokers, self.fleet.epoch)

    def tick(self, now_s: float) -> None:
        """Stop leading if the lease should have ended some time ago."""
        if self.epoch and self.lease and now_s >= self.lease.end_s + self.timing.give_up_s:
            self.epoch = 0

    def want(self, now_s: float) -> Want:
        """Return what to ask of the registry now."""
        if self.lease is None or now_s >= self.lease.end_s - self.timing.margin_s:
            return Want.NOTHING
        if self.leaving:
            return Want.RELEASE if self._holds else Want.NOTHING
        if self.epoch:
            return Want.RAISE if self._named > self.epoch else Want.NOTHING
        # If the answer to its call was lost, the broker holds the leadership but does not lead.
        free = self.fleet.leader is None and self.address in self.fleet.brokers
        return Want.LEAD if free or self._holds else Want.NOTHING

    @property
    def _holds(self) -> bool:
        """Whether the registry names this broker as the leader."""
        return self.fleet.leader is not None and self.fleet.leader.mine

    @property
    def named_epoch(self) -> int:
        """The highest epoch that anybody has named."""
        return self._named
