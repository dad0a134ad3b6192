"""Several brokers share pools out over a real etcd, and hand them on."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from agent_harness.waiting import until
from etcd.scene import POOLS, WITHIN_S, at_etcd, shared_out
from etcd_harness.cluster import EtcdCluster, client_of, running_etcd
from restow.broker.layout.values import ModelIdentity, Pool
from restow.broker.owners.claim import Claim
from restow.broker.owners.events import Seen
from restow.broker.owners.registry import AddressTakenError, LeaseEndedError
from restow.broker.owners.timing import Timing
from restow.broker.registry.etcd import EtcdRegistry
from restow.broker.registry.etcd_client import EtcdClient

LONG = Timing(lease_s=300.0, margin_s=1.0, keep_alive_every_s=1.0)
"""What happens under it happens by word of mouth, and not because a lease has ended."""
SHORT = Timing(lease_s=4.0, margin_s=1.0, keep_alive_every_s=0.5)
X, Y, Z = "x.example:7350", "y.example:7350", "[::1]:7350"


@pytest.fixture
def registry(client: EtcdClient, prefix: bytes) -> EtcdRegistry:
    return EtcdRegistry(client, prefix.decode())


@pytest_asyncio.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as one:
        yield one


async def test_a_claim_is_made_once_and_its_epochs_rise(registry: EtcdRegistry) -> None:
    pool = POOLS[0]
    x, y = [await registry.join(one, 60.0) for one in (X, Y)]
    first = await registry.claim(pool, X, x.lease)
    assert await registry.claim(pool, X, x.lease) == first
    assert await registry.claim(pool, Y, y.lease) == first
    await registry.release(pool, first.epoch - 1)
    assert (await registry.all()).claims == {pool: first}
    await registry.release(pool, first.epoch)
    await registry.release(pool, first.epoch)
    second = await registry.claim(pool, Y, y.lease)
    assert second == Claim(Y, y.lease, second.epoch)
    assert second.epoch > first.epoch
    await registry.release(pool, first.epoch)  # late
    seen = await registry.all()
    assert seen == Seen(seen.revision, frozenset({X, Y}), {pool: second})
    await registry.withdraw(Y, x.lease)
    await registry.withdraw(X, x.lease)
    assert (await registry.all()).members == {Y}
    await registry.revoke(y.lease)
    assert (await registry.all()).claims == {}
    for call in (registry.keep_alive(y.lease), registry.claim(pool, Y, y.lease)):
        with pytest.raises(LeaseEndedError):
            await call


async def test_an_address_is_one_members(registry: EtcdRegistry) -> None:
    await registry.join(X, 60.0)
    with pytest.raises(AddressTakenError, match=r"another broker advertises x\.example:7350"):
        await registry.join(X, 60.0)


async def test_the_watch_tells_all_and_then_every_change(
    registry: EtcdRegistry, client: EtcdClient, prefix: bytes
) -> None:
    await client.put(prefix + b"else", b"nothing of ours")
    x = await registry.join(X, 60.0)
    watch = registry.watch()
    seen = await anext(watch)
    assert isinstance(seen, Seen)
    assert seen == Seen(seen.revision, frozenset({X}), {})
    pool = Pool("a/b", ModelIdentity("ü 100%", "", "a/b"))
    claim = await registry.claim(pool, X, x.lease)
    await registry.revoke(x.lease)
    made, ended = await anext(watch), await anext(watch)
    assert (made.members, made.claims) == ({}, {pool: claim})
    assert (ended.members, ended.claims) == ({X: False}, {pool: None})
    assert seen.revision < made.revision < ended.revision


async def test_who_joins_is_handed_its_share_and_who_leaves_hands_it_on(
    etcd: EtcdCluster, prefix: bytes, stack: AsyncExitStack
) -> None:
    """No lease ends within the test."""
    x, y, z = (at_etcd(etcd, one, prefix.decode(), LONG) for one in (X, Y, Z))
    await stack.enter_async_context(x.running())
    await x.want_all()
    await shared_out(x)
    await stack.enter_async_context(y.running())
    await shared_out(x, y)
    await stack.enter_async_context(z.running())
    await shared_out(x, y, z)
    await y.leave()
    await shared_out(x, z)
    assert {one.to for one in y.lost} <= {X, Z}
    await x.leave()
    await shared_out(z)
    by_pool = sorted(one for broker in (x, y, z) for one in broker.epochs)
    assert len(by_pool) == len({epoch for _, epoch in by_pool})
    assert max(epoch for _, epoch in z.epochs) > max(epoch for _, epoch in x.epochs)


async def test_pools_of_one_that_died_are_claimed_by_the_others(
    etcd: EtcdCluster, prefix: bytes, stack: AsyncExitStack
) -> None:
    x, y = (at_etcd(etcd, one, prefix.decode(), SHORT) for one in (X, Y))
    for one in (x, y):
        await stack.enter_async_context(one.running())
    await x.want_all()
    await y.want_all()
    await shared_out(x, y)
    await y.kill()
    await shared_out(x)


async def test_brokers_that_stood_still_share_out_again(
    etcd: EtcdCluster, prefix: bytes, stack: AsyncExitStack
) -> None:
    """They give their pools up, and own those that are asked for again."""
    x, y = (at_etcd(etcd, one, prefix.decode(), SHORT) for one in (X, Y))
    for one in (x, y):
        await stack.enter_async_context(one.running())
        await one.want_all()
    await shared_out(x, y)
    time.sleep(SHORT.lease_s + 2 * SHORT.give_up_s)  # noqa: ASYNC251 - both stand still
    await until(lambda: bool(x.lost and y.lost), WITHIN_S)
    await shared_out(x, y)


async def test_two_that_advertise_one_address_are_not_both_let_in(
    etcd: EtcdCluster, prefix: bytes, stack: AsyncExitStack
) -> None:
    x, twin = (at_etcd(etcd, X, prefix.decode(), LONG) for _ in range(2))
    await stack.enter_async_context(x.running())
    await x.want_all()
    await shared_out(x)
    await stack.enter_async_context(twin.running())
    await until(lambda: isinstance(twin.membership.trouble, AddressTakenError), WITHIN_S)
    assert not twin.may_grant()
    await x.leave()
    await twin.want_all()
    await shared_out(twin)
    assert twin.membership.trouble is None


async def test_an_etcd_that_is_gone_for_a_while_costs_no_pool_and_grants_nothing_meanwhile(
    tmp_path: Path, stack: AsyncExitStack
) -> None:
    async with running_etcd(tmp_path) as etcd:
        x = at_etcd(etcd, X, "/restow/", SHORT)
        await stack.enter_async_context(x.running())
        await x.want_all()
        await shared_out(x)
        async with client_of(etcd) as client:
            (await etcd.leader(client)).kill()
        await shared_out(x)
        etcd.start(*(one for one in etcd.members if not one.runs))
        for one in etcd.members:
            one.stop()
        await until(lambda: not x.may_grant(), WITHIN_S)
        await until(lambda: x.membership.trouble is not None, WITHIN_S)
        for one in etcd.members:
            one.go_on()
        await x.want_all()
        await until(lambda: x.may_grant() == set(POOLS), WITHIN_S)
