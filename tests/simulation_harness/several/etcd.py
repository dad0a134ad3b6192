"""A model of etcd as brokers reach it: slow, cut off, leaderless, restored, or asked twice."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass, field
from random import Random
from typing import TypeVar

from restow.broker.registry.etcd_access import EtcdUnreachableError
from restow.broker.registry.registry import AddressTakenError, Fleet, Leader, LeaseEndedError
from simulation_harness.network import Network
from simulation_harness.virtual_loop import Process

T = TypeVar("T")
HOST = "etcd"
CALL_S = 2.0
LOOKS_EVERY_S = 0.5
"""How often it looks for leases that have ended."""
ON_ITS_WAY = 0.3
"""Of the calls that don't get through at once, how many do later."""
TWICE = 0.1
LOST = 0.02


@dataclass
class Keys:
    """What etcd holds of a fleet: by the rules of its leases and transactions."""

    leases: dict[int, tuple[float, float]] = field(default_factory=dict)
    """When each ends, and its length."""
    brokers: dict[str, int] = field(default_factory=dict)
    """The lease of each address."""
    leader: tuple[str, int, int] | None = None
    """Its address, epoch and lease."""
    epoch: int = 0
    last_lease: int = 0

    def expire(self, now_s: float) -> None:
        for lease in [one for one, (end_s, _) in self.leases.items() if end_s <= now_s]:
            self.revoke(lease)

    def revoke(self, lease: int) -> None:
        self.leases.pop(lease, None)
        self.brokers = {at: one for at, one in self.brokers.items() if one != lease}
        if self.leader is not None and self.leader[2] == lease:
            self.leader = None

    def fleet(self, lease: int) -> Fleet:
        leader = None
        if self.leader is not None:
            leader = Leader(*self.leader[:2], mine=self.leader[2] == lease)
        return Fleet(leader, frozenset(self.brokers), self.epoch)

    def lead(self, address: str, lease: int, above: int, *, anew: bool = False) -> Leader | None:
        """Lead unless another broker does, and return the leader; None: the lease has ended."""
        if lease not in self.leases:
            return None
        if self.leader is None or (anew and self.leader[2] == lease and self.leader[1] <= above):
            self.epoch = max(self.epoch, above) + 1
            self.leader = (address, self.epoch, lease)
        return self.fleet(lease).leader


class Etcd:
    """What all brokers share. Its time is the true one."""

    def __init__(self, network: Network, rng: Random) -> None:
        self.network, self.rng = network, rng
        self.keys = Keys()
        self._backup = copy.deepcopy(self.keys)
        self.has_leader = True
        self._leaderless_s = 0.0
        self.faulty, self.slowness = True, 1.0
        self.on_lead: Callable[[Leader], None] = lambda leader: None
        """Hears of each leader at the moment that it begins to lead."""

    @property
    def now_s(self) -> float:
        return self.network.loop.time()

    def delay_s(self) -> float:
        """Draw how long a message takes one way."""
        return self.network.delay_s() * self.slowness

    def later(self, delay_s: float, work: Callable[..., object], *given: object) -> None:
        """Call something after a while, in no process."""
        self.network.loop.call_later(delay_s, work, *given, context=Context())

    def takes(self, host: str) -> bool:
        """Return whether a call of a host would be answered now."""
        return self.has_leader and not self.network.is_cut(host, HOST)

    def keep(self, lease: int, length_s: float) -> None:
        """Begin a lease anew, and look for its end in time."""
        self.keys.leases[lease] = (self.now_s + length_s, length_s)
        self.later(length_s + self.rng.uniform(0.001, LOOKS_EVERY_S), self._expire)

    def _expire(self) -> None:
        if self.has_leader:
            self.keys.expire(self.now_s)

    def back_up(self, *, empty: bool) -> None:
        self._backup = Keys() if empty else copy.deepcopy(self.keys)

    def restore(self, down_s: float) -> None:
        """Bring the backup back, unless etcd has been led since ``down_s`` ago."""
        if self.has_leader or self.now_s - self._leaderless_s < down_s:
            return
        last = self.keys.last_lease
        self.keys = copy.deepcopy(self._backup)
        self.keys.last_lease = last
        self.find_leader()

    def lose_leader(self) -> None:
        if self.has_leader:
            self.has_leader, self._leaderless_s = False, self.now_s

    def heal(self) -> None:
        self.find_leader()
        self.faulty, self.slowness = False, 1.0

    def find_leader(self) -> None:
        """Find a new leader, which gives each lease its whole time."""
        if not self.has_leader:
            self.has_leader = True
            for lease, (_, length_s) in list(self.keys.leases.items()):
                self.keep(lease, length_s)


class ReachedEtcd:
    """Implements `restow.broker.registry.registry.Registry` for one life of a broker."""

    look_every_s = 0.1

    def __init__(self, etcd: Etcd, process: Process) -> None:
        self._etcd, self._process = etcd, process
        self._address, self._lease = "", 0

    async def join(self, address: str, lease_s: float) -> float:
        etcd = self._etcd

        def join() -> int:
            keys = etcd.keys
            if address in keys.brokers:
                return 0
            keys.last_lease += 1
            keys.brokers[address] = keys.last_lease
            etcd.keep(keys.last_lease, lease_s)
            return keys.last_lease

        self._address, self._lease = address, await self._ask(join)
        if not self._lease:
            raise AddressTakenError(address)
        return lease_s

    async def keep_alive(self) -> float:
        etcd, lease = self._etcd, self._lease

        def keep() -> float | None:
            if lease not in etcd.keys.leases:
                return None
            length_s = etcd.keys.leases[lease][1]
            etcd.keep(lease, length_s)
            return length_s

        return _alive(await self._ask(keep))

    async def look(self) -> Fleet:
        etcd, lease, address = self._etcd, self._lease, self._address

        def look() -> Fleet:
            if lease in etcd.keys.leases:
                etcd.keys.brokers.setdefault(address, lease)
            return etcd.keys.fleet(lease)

        return await self._ask(look)

    async def lead(self, epoch: int) -> Leader:
        return await self._lead(epoch, anew=False)

    async def raise_epoch(self, epoch: int) -> Leader:
        return await self._lead(epoch, anew=True)

    async def _lead(self, epoch: int, *, anew: bool) -> Leader:
        etcd, lease, address = self._etcd, self._lease, self._address

        def lead() -> Leader | None:
            before = etcd.keys.leader
            done = etcd.keys.lead(address, lease, epoch, anew=anew)
            if done is not None and etcd.keys.leader != before:
                etcd.on_lead(done)
            return done

        return _alive(await self._ask(lead))

    async def release(self) -> None:
        keys, lease = self._etcd, self._lease

        def release() -> None:
            if keys.keys.leader is not None and keys.keys.leader[2] == lease:
                keys.keys.leader = None

        await self._ask(release)

    async def leave(self) -> None:
        etcd, lease = self._etcd, self._lease
        await self._ask(lambda: etcd.keys.revoke(lease))

    async def _ask(self, do: Callable[[], T]) -> T:
        """Have a call done: once, twice or not at all, early or late, answered or not."""
        etcd, rng, host = self._etcd, self._etcd.rng, self._process.host
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def arrive() -> None:
            if not etcd.takes(host):
                if rng.random() < ON_ITS_WAY:
                    etcd.later(rng.uniform(0.1, 4.0), arrive)
                return
            done = do()
            if not (etcd.faulty and rng.random() < LOST):
                etcd.later(etcd.delay_s(), come_back, done)

        def come_back(done: T) -> None:
            if not answer.done() and not etcd.network.is_cut(host, HOST):
                answer.set_result(done)

        etcd.later(etcd.delay_s(), arrive)
        if rng.random() < TWICE:  # asked of another of its members, too
            etcd.later(rng.uniform(0.0, 1.0), arrive)
        try:
            async with asyncio.timeout(CALL_S):
                return await answer
        except TimeoutError:
            raise EtcdUnreachableError("no etcd answers") from None


def _alive(done: T | None) -> T:
    """Return the answer of a call. Raises `LeaseEndedError` if there is none."""
    if done is None:
        raise LeaseEndedError("the broker's lease has ended")
    return done
