"""A registry says who leads a fleet of brokers: etcd, or Lease objects of Kubernetes.

The brokers of a fleet agree only on who leads. Each broker registers its address under a lease, and
keeps the lease alive. A broker that finds that nobody leads may lead, in an *epoch*: a number of
the fleet that only rises. The registry keeps the highest epoch, so that the next leader takes a
higher epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from restow.broker.addresses import checked_target
from restow.broker.errors import AddressInvalidError, RequestError, RestowError


class LeaseEndedError(RestowError, status="ABORTED", reason="BROKER_LEASE_ENDED"):
    """The broker's lease has ended: another broker may lead."""


class AddressTakenError(RestowError, status="ALREADY_EXISTS", reason="ADDRESS_TAKEN"):
    """Another broker has the address, or an earlier life of this broker whose lease lives."""

    def __init__(self, address: str) -> None:
        """Name the address."""
        super().__init__(
            f"another broker advertises {address}, or did a moment ago: give each broker an "
            f"--advertise of its own; a killed broker is gone when its lease ends",
            address=address,
        )


TRIES = 5
"""How often a change is tried when other brokers change the same entries meanwhile."""


def written_address(said: bytes) -> str:
    """Return an address that a broker wrote, or an empty text for an invalid address."""
    try:
        return checked_target(said.decode())
    except (AddressInvalidError, UnicodeDecodeError):
        return ""


@dataclass(frozen=True, slots=True)
class Leader:
    """The broker that leads, and the epoch in which it does."""

    address: str
    epoch: int
    mine: bool = False
    """Whether the leader is the broker that asks, in its present life."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """What a registry knows of a fleet."""

    leader: Leader | None
    """None: nobody leads."""
    brokers: frozenset[str]
    """Addresses of all brokers that are registered, with the leader."""
    epoch: int = 0
    """The highest epoch that was ever written. 0: no epoch was written."""


class Registry(Protocol):
    """One broker's place in a registry.

    Every call may be repeated. It raises a `RestowError` when its outcome is not known, and
    `LeaseEndedError` when the broker's lease has ended: then `join` begins a new lease.
    """

    look_every_s: float
    """How often to ask the registry for the fleet."""

    async def join(self, address: str, lease_s: float) -> float:
        """Register the broker under a new lease; return the lease's length in seconds.

        Raises `AddressTakenError`.
        """
        ...

    async def keep_alive(self) -> float:
        """Renew the lease; return its length in seconds."""
        ...

    async def look(self) -> Fleet:
        """Return the leader and the brokers now. Write the broker's entry again if it is gone."""
        ...

    async def lead(self, epoch: int) -> Leader:
        """Lead if nobody leads, in a new epoch above ``epoch``; return the leader."""
        ...

    async def raise_epoch(self, epoch: int) -> Leader:
        """Go on leading in an epoch above ``epoch``; return the leader now."""
        ...

    async def release(self) -> None:
        """Stop leading, and stay registered."""
        ...

    async def leave(self) -> None:
        """End the lease, and remove all entries under it."""
        ...


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of leading, in seconds. Raises `RequestError` for times that cannot be kept."""

    lease_s: float = 2.0
    """Length of a lease; the registry may make it longer."""
    margin_s: float = 0.5
    """How long before the end of its lease a leader stops. This covers clocks that run at different
    rates, and orders that are decided and not yet sent."""
    keep_alive_every_s: float = 0.4
    give_up_s: float = 1.0
    """How long after the end of its lease a leader assumes that another broker leads, though nobody
    has said so: a leader that is cut off only from the registry would keep its clients."""
    retry_s: float = 0.3
    """How long to wait after a call that failed."""

    @classmethod
    def of_lease(cls, lease_s: float) -> Timing:
        """Return the times for a lease: a quarter of it is margin, and it is kept alive 5 times."""
        return cls(
            lease_s,
            margin_s=lease_s / 4,
            keep_alive_every_s=lease_s / 5,
            give_up_s=lease_s / 2,
        )

    def __post_init__(self) -> None:
        """Raise `RequestError`."""
        usable_s = self.lease_s - self.margin_s
        if self.margin_s < 0 or self.keep_alive_every_s <= 0 or usable_s < self.keep_alive_every_s:
            raise RequestError(
                f"a lease of {self.lease_s:g} s with a margin of {self.margin_s:g} s cannot be "
                f"kept alive every {self.keep_alive_every_s:g} s: make the lease longer",
                field="lease_s",
            )
