"""A model of etcd as brokers reach it: slow, cut off, leaderless, and asked twice at times."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextvars import Context
from random import Random
from typing import TypeVar

from owners_simulation.registry import Registry
from restow.broker.layout.values import Pool
from restow.broker.owners.claim import Claim
from restow.broker.owners.events import Changed, Seen
from restow.broker.owners.registry import AddressTakenError, Entry, LeaseEndedError
from restow.broker.registry.etcd_access import EtcdUnreachableError
from simulation_harness.network import Network
from simulation_harness.virtual_loop import Process

T = TypeVar("T")
HOST = "etcd"
CALL_S = 2.0
WATCH_S = 4.0
"""After which a watch that nothing comes through is given up."""
LOOKS_EVERY_S = 0.5
"""How often it looks for leases that have ended."""
ON_ITS_WAY = 0.3
"""Of the calls that don't get through at once, how many do later."""
TWICE = 0.1
LOST = 0.02


class Etcd:
    """What all brokers share. Its time is the true one."""

    def __init__(self, network: Network, rng: Random) -> None:
        self.network, self.rng = network, rng
        self.registry = Registry()
        self.stalled_until_s: dict[str, float] = {}
        """Of brokers' hosts: until when their watches hear nothing."""
        self.faulty, self.slowness = True, 1.0
        self.on_claim: Callable[[Claim], None] = lambda claim: None
        """Hears of each claim at the moment that it is made."""
        self._changed: asyncio.Future[None] | None = None
        self._told = 0

    @property
    def now_s(self) -> float:
        return self.network.loop.time()

    def delay_s(self) -> float:
        """Of a message, one way."""
        return self.network.delay_s() * self.slowness

    def later(self, delay_s: float, work: Callable[..., object], *given: object) -> None:
        """It belongs to no process."""
        self.network.loop.call_later(delay_s, work, *given, context=Context())

    def takes(self, host: str) -> bool:
        """Whether a call of a host would be answered now."""
        return self.registry.has_leader and not self.network.is_cut(host, HOST)

    def do(self, work: Callable[[], T]) -> T:
        done = work()
        self.tell()
        return done

    def tell(self) -> None:
        """Whoever watches looks, if anything has changed."""
        if len(self.registry.history) != self._told:
            self._told = len(self.registry.history)
            changed, self._changed = self._changed, None
            if changed is not None and not changed.done():
                changed.set_result(None)

    async def change(self) -> None:
        """Wait for the next one."""
        if self._changed is None:
            self._changed = self.network.loop.create_future()
        await asyncio.shield(self._changed)

    def watch_lease(self, length_s: float) -> None:
        """It has begun anew: look for its end in time."""
        self.later(length_s + self.rng.uniform(0.001, LOOKS_EVERY_S), self._expire)

    def _expire(self) -> None:
        self.do(lambda: self.registry.expire(self.now_s))

    def lose_leader(self) -> None:
        self.registry.has_leader = False

    def heal(self) -> None:
        self.find_leader()
        self.stalled_until_s.clear()
        self.faulty, self.slowness = False, 1.0

    def find_leader(self) -> None:
        if not self.registry.has_leader:
            self.registry.find_leader(self.now_s)
            for lease in self.registry.leases.values():
                self.watch_lease(lease.length_s)


class ReachedEtcd:
    """Implements `restow.broker.owners.registry.Registry` for one life of a broker."""

    def __init__(self, etcd: Etcd, process: Process) -> None:
        self._etcd, self._process = etcd, process
        self._registry = etcd.registry

    async def join(self, address: str, length_s: float) -> Entry:
        etcd = self._etcd

        def join() -> int | None:
            etcd.watch_lease(length_s)
            return self._registry.join(address, length_s, etcd.now_s)

        lease = await self._ask(join)
        if lease is None:
            raise AddressTakenError(f"another member is at {address}", address=address)
        return Entry(lease, length_s, "simulated")

    async def keep_alive(self, lease: int) -> float:
        etcd = self._etcd

        def keep_alive() -> float | None:
            length_s = self._registry.keep_alive(lease, etcd.now_s)
            if length_s is not None:
                etcd.watch_lease(length_s)
            return length_s

        return _alive(lease, await self._ask(keep_alive))

    async def claim(self, pool: Pool, address: str, lease: int) -> Claim:
        def claim() -> Claim | None:
            before = self._registry.revision
            done = self._registry.claim(pool, address, lease)
            if done is not None and done.epoch > before:
                self._etcd.on_claim(done)
            return done

        return _alive(lease, await self._ask(claim))

    async def release(self, pool: Pool, epoch: int) -> None:
        await self._ask(lambda: self._registry.release(pool, epoch))

    async def withdraw(self, address: str, lease: int) -> None:
        await self._ask(lambda: self._registry.withdraw(address, lease))

    async def revoke(self, lease: int) -> None:
        await self._ask(lambda: self._registry.revoke(lease))

    async def watch(self) -> AsyncIterator[Seen | Changed]:
        """Yield what has happened, in order, some time after it has."""
        etcd, history = self._etcd, self._registry.history
        if not etcd.takes(self._process.host):
            await asyncio.sleep(CALL_S)
            raise EtcdUnreachableError("no etcd answers")
        seen, heard = self._registry.seen(), len(history)
        await self._comes()
        yield seen
        while True:
            if heard == len(history):
                await etcd.change()
            await self._passes()
            events, heard = history[heard:], len(history)
            for event in events:
                yield event

    async def _passes(self) -> None:
        """Wait until what has happened arrives here. Raises when it does not."""
        etcd, host = self._etcd, self._process.host
        await self._comes()
        until_s = etcd.now_s + WATCH_S
        while etcd.now_s < etcd.stalled_until_s.get(host, 0.0) or not etcd.takes(host):
            if etcd.now_s > until_s and not etcd.takes(host):
                raise EtcdUnreachableError("no etcd answers")
            await asyncio.sleep(0.1)

    async def _comes(self) -> None:
        """Wait for a message. Raises when it takes longer than a watch may be silent."""
        delay_s = self._etcd.delay_s()
        await asyncio.sleep(min(delay_s, WATCH_S))
        if delay_s > WATCH_S:
            raise EtcdUnreachableError("no etcd answers")

    async def _ask(self, do: Callable[[], T]) -> T:
        """Have a call done: once, twice or not, early or late, and answered or not."""
        etcd, rng, host = self._etcd, self._etcd.rng, self._process.host
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def arrive() -> None:
            if not etcd.takes(host):
                if rng.random() < ON_ITS_WAY:
                    etcd.later(rng.uniform(0.1, 4.0), arrive)
                return
            done = etcd.do(do)
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


def _alive(lease: int, done: T | None) -> T:
    """Raises `LeaseEndedError`."""
    if done is None:
        raise LeaseEndedError("the broker's lease has ended", lease=lease)
    return done
