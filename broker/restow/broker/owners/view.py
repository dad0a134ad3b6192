"""What a member has heard of the others: it may be old, and proves nothing."""

from __future__ import annotations

from restow.broker.layout.values import Pool
from restow.broker.owners.claim import Claim, chosen
from restow.broker.owners.events import Changed, Seen


class View:
    """Members and claims, as far as a watch has told them."""

    def __init__(self) -> None:
        """Nothing is known."""
        self.revision = 0
        self.members: frozenset[str] = frozenset()
        self.claims: dict[Pool, Claim] = {}

    def see(self, seen: Seen) -> dict[Pool, Claim]:
        """Take all there is, unless more is known; returns the claims that have gone."""
        if seen.revision < self.revision:
            return {}
        found = dict(seen.claims)
        # What an answer has told may be newer than what was read for the watch.
        found |= {pool: claim for pool, claim in self.claims.items() if claim.epoch > seen.revision}
        gone = {pool: one for pool, one in self.claims.items() if pool not in found}
        self.revision, self.members, self.claims = seen.revision, seen.members, found
        return gone

    def change(self, changed: Changed) -> dict[Pool, Claim]:
        """Take a change, unless it is known; returns the claims that have gone."""
        if changed.revision <= self.revision:
            return {}
        self.revision = changed.revision
        here = {name for name, there in changed.members.items() if there}
        self.members = (self.members - changed.members.keys()) | here
        gone = {}
        for pool, claim in changed.claims.items():
            known = self.claims.get(pool)
            if claim is not None:
                if known is None or known.epoch < claim.epoch:
                    self.claims[pool] = claim
            elif known is not None and known.epoch < changed.revision:
                gone[pool] = self.claims.pop(pool)
        return gone

    def learn(self, pool: Pool, claim: Claim) -> None:
        """Take a claim that an answer told, unless it is older than what has been seen."""
        known = self.claims.get(pool)
        if claim.epoch > max(self.revision, known.epoch if known is not None else 0):
            self.claims[pool] = claim

    def forget(self, pool: Pool, epoch: int) -> None:
        """A claim is gone, whatever has been seen of that."""
        known = self.claims.get(pool)
        if known is not None and known.epoch <= epoch:
            del self.claims[pool]

    def chosen(self, pool: Pool, without: str = "") -> str | None:
        """Who is to own a pool, of the members that are known."""
        return chosen(pool, self.members - {without})
