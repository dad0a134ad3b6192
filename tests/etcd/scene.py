"""Brokers' memberships over a registry, with what they were told."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from agent_harness.waiting import until
from etcd_harness.cluster import EtcdCluster, client_of
from restow.broker.layout.values import ModelIdentity, Pool
from restow.broker.owners.actions import Drain, Lost, Serve
from restow.broker.owners.claim import chosen
from restow.broker.owners.events import Drained, Wanted
from restow.broker.owners.registry import Registry
from restow.broker.owners.timing import Timing
from restow.broker.registry.etcd import EtcdRegistry
from restow.broker.server.fleet.membership import Membership, OfPools

POOLS = tuple(Pool(tenant, ModelIdentity("a model/with 100%", "1")) for tenant in "abcdefgh")
WITHIN_S = 60.0
AGAIN_S = 0.2
Opened = Callable[[], contextlib.AbstractAsyncContextManager[Registry]]
"""A registry inside an ``async with``."""


class Broker:
    """One of several, in this process."""

    def __init__(self, opened: Opened, address: str, timing: Timing) -> None:
        self.address = address
        self._opened, self._timing = opened, timing
        self.served: dict[Pool, int] = {}
        self.epochs: list[tuple[Pool, int]] = []
        """Of all that it ever served."""
        self.lost: list[Lost] = []

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Broker]:
        """Until the end, where it is killed unless it has left."""
        async with self._opened() as registry:
            self.membership = Membership(registry, self.address, self._act, self._timing)
            self._task = asyncio.create_task(self.membership.run())
            try:
                yield self
            finally:
                await self.kill()

    async def kill(self) -> None:
        """Its lease is left behind."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self.served.clear()

    async def leave(self) -> None:
        await self.membership.leave()
        await self._task

    def _act(self, action: OfPools) -> None:
        match action:
            case Serve(pool, epoch):
                if self.served.get(pool) != epoch:
                    self.epochs.append((pool, epoch))
                self.served[pool] = epoch
            case Drain(pool, epoch):
                drained = Drained(pool, epoch)
                asyncio.get_running_loop().call_soon(self.membership.hear, drained)
            case Lost(pool, _, to):
                self.served.pop(pool, None)
                self.lost.append(action)
                if to is None:  # its engines ask any broker, and again
                    loop = asyncio.get_running_loop()
                    loop.call_later(AGAIN_S, self.membership.hear, Wanted(pool))

    def may_grant(self) -> set[Pool]:
        return {pool for pool in POOLS if self.membership.may_grant(pool) is not None}

    async def want_all(self) -> None:
        """Once it is one of them."""
        await until(lambda: self.membership.member.lease is not None, WITHIN_S)
        for pool in POOLS:
            self.membership.hear(Wanted(pool))


def at_etcd(etcd: EtcdCluster, address: str, prefix: str, timing: Timing) -> Broker:
    @contextlib.asynccontextmanager
    async def opened() -> AsyncIterator[Registry]:
        async with client_of(etcd) as client:
            yield EtcdRegistry(client, prefix)

    return Broker(opened, address, timing)


async def shared_out(*brokers: Broker) -> None:
    """Wait until each has its share, and say at all times that nobody has another's."""
    addresses = [one.address for one in brokers]
    shares = {
        one.address: {pool for pool in POOLS if chosen(pool, addresses) == one.address}
        for one in brokers
    }

    def done() -> bool:
        granting = [pool for one in brokers for pool in one.may_grant()]
        assert len(granting) == len(set(granting)), "a pool has two owners"
        return all(one.may_grant() == shares[one.address] for one in brokers)

    await until(done, WITHIN_S)
