"""T4 and T5: D dies with a lease in its hands; a lease runs out under a read."""

from __future__ import annotations

import pytest

from chaos.scene import prompt, scene

pytestmark = [pytest.mark.sampled, pytest.mark.timeout(180)]
ROUNDS = 10


async def test_t4_d_killed_while_it_reads() -> None:
    """Check that P's pages come back without a new request, and that another ready state stays."""
    # P has its pages back when the grant of the dead is over.
    async with scene(options=("--grant-s", "6", "--settle-grace-s", "2")) as world:
        await world.ready(prompt("other"))
        await world.reading(prompt("a"))
        world.cluster.end_engine("D")
        state, reason = await world.ends("a", "P")
        assert state == "FAILED"
        assert reason
        world.cluster.worker("P.0").go_on()
        world.start("D")
        await world.cluster.connected()
        world.cluster.decode(prompt("other"))
        assert await world.ends("other") == ("DONE", "")
        await world.heals()


async def test_t5_a_read_that_comes_too_late_is_seen_every_time() -> None:
    # A rank of D sleeps with its order in hand until P has used the pages for something else.
    async with scene(options=("--grant-s", "30", "--settle-grace-s", "0.5")) as world:
        await world.hand_over(prompt("first"))
        for number in range(ROUNDS):
            name = f"late {number}"
            hurried = prompt(name, lease_ms=400, hold_ms=400, timeout_ms=5000)
            world.cluster.worker("D.1").stop()
            world.cluster.prefill(hurried)
            world.cluster.decode(hurried)
            await world.ends(name, "P")
            world.cluster.worker("D.1").go_on()
            state, _ = await world.ends(name)
            assert state in ("EXPIRED", "FAILED")
        await world.heals()


async def test_t5_without_faults_there_are_no_alarms() -> None:
    async with scene() as world:
        ends = [await world.hand_over(prompt(f"in time {n}")) for n in range(ROUNDS)]
        assert ends == [("DONE", "")] * ROUNDS
        await world.heals()
