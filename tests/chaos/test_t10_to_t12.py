"""T10 to T12: single ranks that fail, a directory that is full, a broker that stands still."""

from __future__ import annotations

import asyncio

import pytest

from chaos.scene import HASTY, PATIENT, prompt, scene

pytestmark = [pytest.mark.sampled, pytest.mark.timeout(180)]


@pytest.mark.parametrize("rank", [0, 1])
async def test_t10_one_rank_that_fails_fails_all(rank: int) -> None:
    # Each rank of P is read by a rank of D. The part of the rank that works arrives, and is not
    # used.
    async with scene(tps=(2, 2), options=HASTY) as world:
        await world.ready(prompt("a"))
        world.cluster.worker(f"P.{rank}").stop()
        world.cluster.decode(prompt("a", timeout_ms=5000))
        assert await world.ends("a") == ("FAILED", "READ_DEADLINE")
        world.cluster.worker(f"P.{rank}").go_on()
        await world.heals()


async def test_t11_a_full_directory_says_so_and_recovers() -> None:
    async with scene(options=(*PATIENT, "--max-live", "3")) as world:
        for name in "abc":
            await world.ready(prompt(name, pages=1, lease_ms=3000, hold_ms=3000))
        world.cluster.prefill(prompt("d", pages=1))
        assert await world.ends("d", "P") == ("REFUSED", "DIRECTORY_FULL")
        world.cluster.decode(prompt("a", pages=1))
        assert await world.ends("a") == ("DONE", "")
        for name in "bc":
            await world.ends(name, "P")
        await world.heals()


async def test_t12_a_broker_that_stands_still_costs_time_and_nothing_else() -> None:
    # The broker keeps its state in memory alone. T1 tests the loss of the broker, T12 its silence.
    async with scene() as world:
        await world.ready(prompt("a"))
        broker = world.cluster.broker
        assert broker is not None
        broker.stop()
        world.cluster.decode(prompt("a"))
        await asyncio.wait({asyncio.create_task(world.ends("a"))}, timeout=2.0)
        assert ("D", "a") not in world.cluster.found.said
        broker.go_on()
        assert await world.ends("a") == ("DONE", "")
        await world.heals()
