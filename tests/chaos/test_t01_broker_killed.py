"""T1: the broker is killed at a step of a handoff, and comes back empty."""

from __future__ import annotations

import pytest

from chaos.scene import Scene, prompt, scene

pytestmark = [pytest.mark.sampled, pytest.mark.timeout(120)]


async def test_t1_a_state_that_lies_ready_is_ready_again() -> None:
    async with scene() as world:
        await world.ready(prompt("a"))
        await world.restart_broker()
        world.cluster.decode(prompt("a"))
        assert await world.ends("a") == ("DONE", "")
        assert await world.ends("a", "P") == ("DONE", "")
        await world.heals()


async def test_t1_d_that_waits_goes_on_waiting() -> None:
    async with scene() as world:
        world.cluster.decode(prompt("a"))
        await world.cluster.reaches("a", "WAITING")
        await world.restart_broker()
        world.cluster.prefill(prompt("a"))
        assert await world.ends("a") == ("DONE", "")
        await world.heals()


@pytest.mark.parametrize("strategy", ["slices", "pack"])
async def test_t1_a_read_under_way_comes_to_its_end(strategy: str) -> None:
    """Check that D's pages hold the right bytes, whether D uses what was read or reads again."""
    async with scene() as world:
        await world.restart_broker("--strategy", strategy)
        await world.hand_over(prompt("first"))
        await world.ready(prompt("a"))
        world.cluster.worker("P.0").stop()
        world.cluster.decode(prompt("a"))
        await world.cluster.reaches("a", "READING" if strategy == "slices" else "STAGING")
        await world.restart_broker("--strategy", strategy)
        world.cluster.worker("P.0").go_on()
        assert await world.ends("a") == ("DONE", "")
        assert await world.ends("a", "P") == ("DONE", "")
        await world.heals()


async def test_t1_no_end_is_told_twice() -> None:
    async with scene() as world:
        assert await world.hand_over(prompt("a")) == ("DONE", "")
        await world.restart_broker()
        await world.heals()
        assert sum(world.cluster.found.ends.values()) == len(world.cluster.found.said)


async def test_t1_killed_again_and_again() -> None:
    """Check that handoffs survive a broker that is killed faster than all engines can come back."""

    async def kill(world: Scene) -> None:
        for _ in range(5):
            await world.restart_broker()

    async with scene() as world:
        await world.ready(prompt("a"))
        world.cluster.decode(prompt("b"))
        await kill(world)
        world.cluster.decode(prompt("a"))
        world.cluster.prefill(prompt("b"))
        assert [await world.ends(name) for name in "ab"] == [("DONE", "")] * 2
        await world.heals()
