"""A model of etcd: linearizable, with leases, and with a leader that it may lose."""

from __future__ import annotations

from dataclasses import dataclass, field

from restow.broker.layout.values import Pool
from restow.broker.owners.claim import Claim
from restow.broker.owners.events import Changed, Seen


@dataclass(slots=True)
class LeaseState:
    """One that lives."""

    length_s: float
    end_s: float


@dataclass(slots=True)
class Registry:
    """What all members share. Its time is the true one."""

    revision: int = 1
    leases: dict[int, LeaseState] = field(default_factory=dict)
    members: dict[str, int] = field(default_factory=dict)
    """By address: the lease."""
    claims: dict[Pool, Claim] = field(default_factory=dict)
    history: list[Changed] = field(default_factory=list)
    has_leader: bool = True
    compares_epochs: bool = True
    """Whether a release names the epoch, and a claim that there is none: as it should."""
    _last_lease: int = 0

    def join(self, address: str, length_s: float, now_s: float) -> int | None:
        """The lease; None: another one has the address."""
        if address in self.members:
            return None
        self._last_lease += 1
        self.leases[self._last_lease] = LeaseState(length_s, now_s + length_s)
        self.members[address] = self._last_lease
        self._change({address: True}, {})
        return self._last_lease

    def keep_alive(self, lease: int, now_s: float) -> float | None:
        """Its length; None: it has ended."""
        found = self.leases.get(lease)
        if found is None:
            return None
        found.end_s = now_s + found.length_s
        return found.length_s

    def claim(self, pool: Pool, address: str, lease: int) -> Claim | None:
        """Whose it is now; None: the lease has ended."""
        if lease not in self.leases:
            return None
        if pool not in self.claims or not self.compares_epochs:
            claim = Claim(address, lease, self.revision + 1)
            self._change({}, {pool: claim})
        return self.claims[pool]

    def release(self, pool: Pool, epoch: int) -> None:
        found = self.claims.get(pool)
        if found is not None and (found.epoch == epoch or not self.compares_epochs):
            self._change({}, {pool: None})

    def withdraw(self, address: str, lease: int) -> None:
        if self.members.get(address) == lease:
            self._change({address: False}, {})

    def revoke(self, lease: int) -> None:
        if self.leases.pop(lease, None) is not None:
            self._change(
                {one: False for one, by in self.members.items() if by == lease},
                {pool: None for pool, one in self.claims.items() if one.lease == lease},
            )

    def expire(self, now_s: float) -> None:
        """Without a leader nobody looks."""
        if self.has_leader:
            for lease in [n for n, one in self.leases.items() if one.end_s <= now_s]:
                self.revoke(lease)

    def find_leader(self, now_s: float) -> None:
        """A new one lets every lease begin anew."""
        self.has_leader = True
        for one in self.leases.values():
            one.end_s = now_s + one.length_s

    def seen(self) -> Seen:
        return Seen(self.revision, frozenset(self.members), dict(self.claims))

    def _change(self, members: dict[str, bool], claims: dict[Pool, Claim | None]) -> None:
        self.revision += 1
        for address in [one for one, there in members.items() if not there]:
            del self.members[address]
        for pool, claim in claims.items():
            if claim is None:
                del self.claims[pool]
            else:
                self.claims[pool] = claim
        self.history.append(Changed(self.revision, members, claims))
