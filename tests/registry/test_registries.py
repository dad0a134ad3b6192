"""What every registry promises, asked of etcd and of Kubernetes' Leases alike."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from registry.scene import Scene
from restow.broker.registry.registry import (
    AddressTakenError,
    Leader,
    LeaseEndedError,
    Registry,
)

X, Y = "x.example:7350", "y.example:7350"
WITHIN_S = 30.0


async def two(scene: Scene, lease_s: float = 60.0) -> tuple[Registry, Registry]:
    x, y = scene.opened(), scene.opened()
    await x.join(X, lease_s)
    await y.join(Y, lease_s)
    return x, y


async def leads_when_it_may(registry: Registry) -> Leader:
    """Ask until this broker leads."""
    async with asyncio.timeout(WITHIN_S):
        while True:
            found = (await registry.look()).leader or await registry.lead(0)
            if found.mine:
                return found
            await asyncio.sleep(registry.look_every_s)


async def test_one_leads_until_it_lets_go_and_epochs_rise(scene: Scene) -> None:
    x, y = await two(scene)
    assert (await x.look()).leader is None
    first = await x.lead(0)
    assert first == Leader(X, 1, mine=True)
    assert await x.lead(0) == first
    assert await y.lead(0) == Leader(X, 1)
    found = await y.look()
    assert (found.leader, found.brokers, found.epoch) == (Leader(X, 1), frozenset({X, Y}), 1)
    await y.release()
    assert (await y.look()).leader == Leader(X, 1)
    await x.release()
    assert (await y.look()).leader is None
    assert await y.lead(0) == Leader(Y, 2, mine=True)


async def test_a_leader_takes_and_raises_epochs_above_those_that_are_named(scene: Scene) -> None:
    x, y = await two(scene)
    assert (await x.lead(6)).epoch == 7
    assert await x.raise_epoch(40) == Leader(X, 41, mine=True)
    assert await x.raise_epoch(9) == Leader(X, 41, mine=True)
    assert await y.raise_epoch(90) == Leader(X, 41)
    await x.release()
    assert await y.lead(0) == Leader(Y, 42, mine=True)


async def test_an_address_is_one_brokers(scene: Scene) -> None:
    await scene.opened().join(X, 60.0)
    with pytest.raises(AddressTakenError, match=r"another broker advertises x\.example:7350"):
        await scene.opened().join(X, 60.0)


async def test_another_leads_when_a_lease_has_ended_and_that_life_hears_of_it(scene: Scene) -> None:
    x, y = await two(scene, 2.0)
    await x.lead(0)

    async def keep() -> None:
        while True:
            await y.keep_alive()
            await asyncio.sleep(0.3)

    keeping = asyncio.create_task(keep())
    try:
        assert await leads_when_it_may(y) == Leader(Y, 2, mine=True)
        with pytest.raises(LeaseEndedError):
            await x.keep_alive()
        with contextlib.suppress(LeaseEndedError):
            assert await x.lead(0) == Leader(Y, 2)
        await x.join(X, 2.0)
        assert (await x.look()).leader == Leader(Y, 2)
    finally:
        keeping.cancel()


async def test_who_leaves_is_gone_at_once(scene: Scene) -> None:
    x, y = await two(scene)
    await x.lead(0)
    await x.leave()
    await x.leave()
    found = await y.look()
    assert (found.leader, found.brokers) == (None, frozenset({Y}))
    assert await y.lead(0) == Leader(Y, 2, mine=True)


async def test_another_leads_in_a_higher_epoch_when_somebody_deletes_the_leaders_key(
    scene: Scene,
) -> None:
    x, y = await two(scene)
    epoch = (await x.lead(0)).epoch
    await scene.delete_leader()
    assert (await x.look()).leader is None
    assert await y.lead(epoch) == Leader(Y, epoch + 1, mine=True)
    assert (await x.look()).leader == Leader(Y, epoch + 1)


async def test_a_registry_that_has_lost_everything_is_joined_anew(scene: Scene) -> None:
    x, y = await two(scene)
    await x.lead(6)
    await scene.delete_all()
    for one, address in ((x, X), (y, Y)):
        try:
            await one.keep_alive()
            await one.look()
        except LeaseEndedError:
            await one.join(address, 60.0)
    assert (await x.look()).brokers == {X, Y}
    assert await y.lead(7) == Leader(Y, 8, mine=True)
