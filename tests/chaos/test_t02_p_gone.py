"""T2 and T3: P is killed, stands still or is cut off in the middle of a read."""

from __future__ import annotations

import contextlib

import pytest

from chaos.scene import HASTY, prompt, scene
from chaos_harness.cluster import WIRES
from chaos_harness.hosts import Hosts, why_not

pytestmark = [pytest.mark.sampled, pytest.mark.timeout(120)]
DEADLINE_S = 30.0
"""Far more than the bounds add up to: the machine may be slow, an end that hangs never comes."""


async def test_t2_p_killed_while_d_reads() -> None:
    async with scene(options=HASTY) as world:
        await world.reading(prompt("a"))
        world.cluster.end_engine("P")
        state, reason = await world.ends("a", within_s=DEADLINE_S)
        assert state == "FAILED"
        assert reason
        world.start("P")
        await world.cluster.connected()
        await world.heals()


async def test_t2_p_stands_still_while_d_reads() -> None:
    async with scene(options=HASTY) as world:
        await world.reading(prompt("a", timeout_ms=5000))
        assert await world.ends("a", within_s=DEADLINE_S) == ("FAILED", "READ_DEADLINE")
        world.cluster.worker("P.0").go_on()
        await world.heals()


async def test_t2_p_stands_still_for_longer_than_a_grant_and_goes_on() -> None:
    async with scene(options=HASTY) as world:
        await world.reading(prompt("a", timeout_ms=60_000))
        await world.cluster.happens("a", "read_deadline")
        world.cluster.worker("P.0").go_on()
        assert await world.ends("a") == ("DONE", "")
        await world.heals()


@pytest.mark.parametrize("wire", [("p", "d"), ("b", "p"), ("b", "d")])
async def test_t2_hosts_cut_off_while_d_reads(wire: tuple[str, str]) -> None:
    if why := why_not():
        pytest.skip(f"NO HOSTS: {why}")
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(Hosts(WIRES))
        async with scene(hosts=hosts, options=HASTY) as world:
            await world.reading(prompt("a", timeout_ms=5000, hold_ms=5000, lease_ms=5000))
            world.cluster.cut(*wire)
            world.cluster.worker("P.0").go_on()
            # A D that does not reach the broker hears when it does again.
            if wire == ("b", "d"):
                await world.ends("a", "P", DEADLINE_S)
                world.cluster.heal(*wire)
            state, _ = await world.ends("a", within_s=DEADLINE_S)
            if wire != ("b", "p"):  # without the broker P is read all the same
                assert state in ("FAILED", "EXPIRED")
            world.cluster.heal(*wire)
            await world.ends("a", "P", DEADLINE_S)
            await world.heals()


async def test_t3_late_bytes_reach_no_page_that_is_used_again() -> None:
    # P goes on after D has given up, when D's pages have long been used for something else.
    async with scene(options=HASTY) as world:
        for name in "abc":
            await world.reading(prompt(name, pages=8, timeout_ms=5000))
            assert await world.ends(name) == ("FAILED", "READ_DEADLINE")
            world.cluster.worker("P.0").go_on()
        await world.heals()
