"""Several brokers share pools out by Leases, and hand them on: as with etcd."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import UTC, datetime

import pytest
import pytest_asyncio

from agent_harness.waiting import until
from etcd.scene import POOLS, WITHIN_S, shared_out
from kubernetes_harness.server import ApiServer
from kubernetes_leases.scene import FLEET, with_leases
from restow.broker.kubernetes.api import LeasesApi
from restow.broker.kubernetes.registry import KubernetesRegistry
from restow.broker.layout.values import ModelIdentity, Pool
from restow.broker.owners.claim import Claim
from restow.broker.owners.events import Seen
from restow.broker.owners.registry import AddressTakenError, LeaseEndedError
from restow.broker.owners.timing import Timing
from restow.broker.server.fleet.membership import seconds_awake_or_not

LONG = Timing(lease_s=300.0, margin_s=1.0, keep_alive_every_s=1.0)
"""What happens under it happens by word of mouth, and not because a lease has ended."""
SHORT = Timing(lease_s=4.0, margin_s=1.0, keep_alive_every_s=0.5)
X, Y, Z = "x.example:7350", "y.example:7350", "[::1]:7350"


@pytest.fixture
def registry(api: LeasesApi) -> KubernetesRegistry:
    return KubernetesRegistry(api, FLEET, seconds_awake_or_not)


@pytest_asyncio.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as one:
        yield one


async def test_a_claim_is_made_once_and_its_epochs_rise(registry: KubernetesRegistry) -> None:
    pool = POOLS[0]
    x, y = [await registry.join(one, 60.0) for one in (X, Y)]
    assert x.fleet == y.fleet
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
    assert await registry.keep_alive(y.lease) == 60.0
    seen = await registry.all()
    assert seen == Seen(seen.revision, frozenset({X, Y}), {pool: second})
    await registry.withdraw(Y, x.lease)
    await registry.withdraw(X, x.lease)
    assert await registry.keep_alive(x.lease) == 60.0
    assert (await registry.all()).members == {Y}
    await registry.revoke(y.lease)
    assert (await registry.all()).claims == {}
    for call in (registry.keep_alive(y.lease), registry.claim(pool, Y, y.lease)):
        with pytest.raises(LeaseEndedError):
            await call
    third = await registry.claim(pool, X, x.lease)
    assert third.epoch > second.epoch


async def test_an_address_is_one_members(registry: KubernetesRegistry) -> None:
    await registry.join(X, 60.0)
    with pytest.raises(AddressTakenError, match=r"another broker advertises x\.example:7350"):
        await registry.join(X, 60.0)


async def test_the_watch_tells_all_and_then_every_change(
    registry: KubernetesRegistry, server: ApiServer
) -> None:
    others = {"metadata": {"name": "controller", "labels": {"restow/fleet": "green"}}, "spec": {}}
    server.leases.create(others)
    x = await registry.join(X, 60.0)
    watch = registry.watch()
    seen = await anext(watch)
    assert isinstance(seen, Seen)
    assert seen == Seen(seen.revision, frozenset({X}), {})
    pool = Pool("a/b", ModelIdentity("ü 100%", "", "a/b"))
    claim = await registry.claim(pool, X, x.lease)
    await registry.keep_alive(x.lease)
    await registry.revoke(x.lease)
    made, ended = await anext(watch), await anext(watch)
    assert (made.members, made.claims) == ({}, {pool: claim})
    assert (ended.members, ended.claims) == ({X: False}, {pool: None})
    assert seen.revision < made.revision < ended.revision
    await watch.aclose()


async def test_who_joins_is_handed_its_share_and_who_leaves_hands_it_on(
    server: ApiServer, stack: AsyncExitStack
) -> None:
    """No lease ends within the test."""
    x, y, z = (with_leases(server, one, LONG) for one in (X, Y, Z))
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
    server: ApiServer, stack: AsyncExitStack
) -> None:
    x, y = (with_leases(server, one, SHORT) for one in (X, Y))
    for one in (x, y):
        await stack.enter_async_context(one.running())
    await x.want_all()
    await y.want_all()
    await shared_out(x, y)
    await y.kill()
    await shared_out(x)


async def test_two_that_advertise_one_address_are_not_both_let_in(
    server: ApiServer, stack: AsyncExitStack
) -> None:
    x, twin = (with_leases(server, X, LONG) for _ in range(2))
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


async def test_an_api_that_is_gone_for_a_while_costs_no_pool_and_grants_nothing_meanwhile(
    server: ApiServer, stack: AsyncExitStack
) -> None:
    both = [with_leases(server, one, SHORT, call_s=2.0) for one in (X, Y)]
    for one in both:
        await stack.enter_async_context(one.running())
        await one.want_all()
    await shared_out(*both)
    served = [dict(one.served) for one in both]
    for away, back in ((server.stop, server.start), (server.hang, server.go_on)):
        await away()
        await until(lambda: not any(one.may_grant() for one in both), WITHIN_S)
        await until(lambda: all(one.membership.trouble for one in both), WITHIN_S)
        await until(lambda: unheard_s(server) > 2 * SHORT.lease_s, WITHIN_S)
        await back()
        await shared_out(*both)
    # Whoever was heard first has not ended the other one's life.
    assert [one.served for one in both] == served


def unheard_s(server: ApiServer) -> float:
    """For how long no member has written its Lease."""
    found = server.leases.listed({"restow/kind": "member"})["items"]
    last = max(datetime.fromisoformat(one["spec"]["renewTime"]) for one in found)
    return (datetime.now(UTC) - last).total_seconds()
