"""What one of several brokers tells of itself and of the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from restow.broker.errors import RestowError
from restow.broker.layout.values import Pool


@dataclass(frozen=True, slots=True)
class LeaseReport:
    """A broker's lease, now."""

    length_s: float
    unanswered_s: float
    """Since the last keepalive was sent that was answered."""
    still_s: float | None
    """How long it has stood still, because the lease may have ended; None: it is sure."""


@dataclass(frozen=True, slots=True)
class PoolReport:
    """Who owns a pool, as far as the broker knows."""

    owner: str
    epoch: int
    age_s: float | None
    """Since the epoch began; None: it had begun before the broker came."""
    own: bool = False
    """Whether the broker acts in it."""
    leaving: bool = False
    """Whether it grants nothing new in it."""


@dataclass(frozen=True, slots=True)
class FleetReport:
    """A broker among others."""

    address: str
    """As it advertises it."""
    fleet: str
    """Empty: it has never been let in."""
    members: Mapping[str, float | None]
    """Since how many seconds each is there, by address; None: it was there before the broker."""
    pools: Mapping[Pool, PoolReport]
    lease: LeaseReport | None
    """None: the registry has not let it in, or has told it that its lease has ended."""
    trouble: RestowError | None
    """Why the registry did not do what it was last asked; None: it did."""
    taken: int = 0
    """Epochs of pools that it has begun."""
    lost: int = 0
    """Those of them that are over: others own them, or nobody needs them."""

    @property
    def count(self) -> int:
        """How many brokers there are, with this one."""
        return len(self.members.keys() | {self.address})

    @property
    def let_in(self) -> bool:
        """Whether it is one of them, as far as it knows."""
        return self.lease is not None

    @property
    def sure(self) -> bool:
        """Whether it is let in, and its lease has certainly not ended."""
        return self.lease is not None and self.lease.still_s is None

    @property
    def owned(self) -> int:
        """How many pools are its own."""
        return sum(one.own for one in self.pools.values())
