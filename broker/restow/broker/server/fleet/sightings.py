"""Since when members and claims are there: a registry keeps no times that could be trusted."""

from __future__ import annotations

from restow.broker.layout.values import Pool
from restow.broker.owners.claim import Claim
from restow.broker.owners.events import Changed, Claimed, Event, Joined, Seen


class Sightings:
    """When each was first seen, by the clock of who looks; not known of what was there before."""

    def __init__(self, address: str) -> None:
        """Nothing has been seen; ``address`` is our own."""
        self._address = address
        self._looked = False
        self._members: dict[str, float | None] = {}
        self._claims: dict[Pool, tuple[int, float | None]] = {}
        """Epoch, and when it was seen first."""

    def member(self, address: str) -> float | None:
        """When a member came."""
        return self._members.get(address)

    def claim(self, pool: Pool, epoch: int) -> float | None:
        """When an epoch of a pool began."""
        known, at_s = self._claims.get(pool, (0, None))
        return at_s if known == epoch else None

    def see(self, event: Event, now_s: float) -> None:
        """Take what a member hears."""
        match event:
            case Joined():
                self._members[self._address] = now_s
            case Claimed(pool, claim):
                self._claimed(pool, claim, now_s)
            case Seen():
                self._seen(event, now_s if self._looked else None)
                self._looked = True
            case Changed():
                for address, there in event.members.items():
                    if there:
                        self._members.setdefault(address, now_s)
                    else:
                        self._members.pop(address, None)
                for pool, one in event.claims.items():
                    if one is not None:
                        self._claimed(pool, one, now_s)

    def _seen(self, seen: Seen, at_s: float | None) -> None:
        """All there is, which the first time may have been there for long."""
        members = self._members
        self._members = {one: members.get(one, at_s) for one in seen.members}
        if self._address in members:
            self._members[self._address] = members[self._address]
        for pool in [one for one in self._claims if one not in seen.claims]:
            if self._claims[pool][0] <= seen.revision:  # what an answer told may be newer
                del self._claims[pool]
        for pool, claim in seen.claims.items():
            self._claimed(pool, claim, at_s)

    def _claimed(self, pool: Pool, claim: Claim, at_s: float | None) -> None:
        known, _ = self._claims.get(pool, (0, None))
        if known < claim.epoch:
            self._claims[pool] = claim.epoch, at_s
