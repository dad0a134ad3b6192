"""The Leases of a fleet, as a list and the changes after it tell them."""

from __future__ import annotations

from restow.broker.kubernetes.api import Object, WatchEvent
from restow.broker.kubernetes.leases import (
    MemberLease,
    PoolLease,
    read,
    version_number,
    version_of,
)
from restow.broker.layout.values import Pool
from restow.broker.owners.claim import Claim
from restow.broker.owners.events import Changed, Seen


class LeasesView:
    """Members and claims at one version. A claim counts while its member's life is there.

    A claim is made after its member, so where that is not there, it has ended.
    """

    def __init__(self, listed: Object) -> None:
        """Begin with a list."""
        self.version = version_of(listed)
        self.members: dict[str, MemberLease] = {}
        """By name."""
        self.pools: dict[Pool, PoolLease] = {}
        """Void ones too."""
        for one in map(read, listed.get("items") or ()):
            match one:
                case MemberLease():
                    self.members[one.name] = one
                case PoolLease():
                    self.pools[one.pool] = one

    def seen(self) -> Seen:
        """All there is."""
        members = frozenset(one.address for one in self.members.values() if not one.leaving)
        return Seen(version_number(self.version), members, self._claims())

    def void(self) -> list[PoolLease]:
        """Claims whose member's life has ended."""
        lives = {one.life for one in self.members.values()}
        return [one for one in self.pools.values() if one.life not in lives]

    def take(self, event: WatchEvent) -> Changed | None:
        """Take what became of one object; None: nothing that members need to know."""
        self.version = version_of(event.found)
        if event.kind == "BOOKMARK":
            return None
        members, claims = self._there(), self._claims()
        match read(event.found):
            case MemberLease() as one if event.kind == "DELETED":
                self.members.pop(one.name, None)
            case MemberLease() as one:
                self.members[one.name] = one
            case PoolLease() as one if event.kind == "DELETED":
                self.pools.pop(one.pool, None)
            case PoolLease() as one:
                self.pools[one.pool] = one
        return self._changed(members, claims)

    def _changed(self, before: set[str], claims: dict[Pool, Claim]) -> Changed | None:
        there, now = self._there(), self._claims()
        members = {one: one in there for one in before ^ there}
        changed: dict[Pool, Claim | None] = {
            pool: now.get(pool)
            for pool in claims.keys() | now.keys()
            if claims.get(pool) != now.get(pool)
        }
        if not members and not changed:
            return None
        return Changed(version_number(self.version), members, changed)

    def _there(self) -> set[str]:
        return {one.address for one in self.members.values() if not one.leaving}

    def _claims(self) -> dict[Pool, Claim]:
        lives = {one.life for one in self.members.values()}
        return {pool: one.claim for pool, one in self.pools.items() if one.life in lives}
