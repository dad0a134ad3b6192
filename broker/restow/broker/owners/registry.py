"""What keeps members and claims: etcd, or whatever has leases, transactions and a watch.

Its calls may be repeated. They raise a `RestowError` when it is not known what became of them, and
`LeaseEndedError` when the lease has ended.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import NamedTuple, Protocol

from restow.broker.errors import RestowError
from restow.broker.layout.values import Pool
from restow.broker.owners.claim import Claim
from restow.broker.owners.events import Changed, Seen


class LeaseEndedError(RestowError, status="ABORTED", reason="MEMBER_LEASE_ENDED"):
    """A member's lease has ended: others own what stood under it, or may."""


class AddressTakenError(RestowError, status="ALREADY_EXISTS", reason="ADDRESS_TAKEN"):
    """Another member has the address, or an earlier life of this one whose lease has not ended."""


class Entry(NamedTuple):
    """A member's place: its lease, and how long that is."""

    lease: int
    length_s: float
    fleet: str = ""
    """The registry's name for itself and for who shares it: epochs of two are not compared."""


class Registry(Protocol):
    """Keeps members, and claims of pools, each under a lease."""

    async def join(self, address: str, length_s: float) -> Entry:
        """Make a lease and the member's key. Raises `AddressTakenError`, too."""
        ...

    async def keep_alive(self, lease: int) -> float:
        """Have a lease begin anew, and return its length in seconds."""
        ...

    async def claim(self, pool: Pool, address: str, lease: int) -> Claim:
        """Make the pool's key if there is none, and return whose it is now."""
        ...

    async def release(self, pool: Pool, epoch: int) -> None:
        """Delete the pool's key if it is of that epoch; return when none of that epoch is there."""
        ...

    async def withdraw(self, address: str, lease: int) -> None:
        """Delete the member's key if it is of that lease."""
        ...

    async def revoke(self, lease: int) -> None:
        """End a lease, with all keys of it."""
        ...

    def watch(self) -> AsyncIterator[Seen | Changed]:
        """Yield all there is, and then each change in its order; it ends with a `RestowError`."""
        ...
