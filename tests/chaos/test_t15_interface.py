"""T15: P's network interface is taken away, and another comes in its place."""

from __future__ import annotations

import pytest

from chaos.scene import PATIENT, prompt, scene
from chaos_harness.cluster import WIRES
from chaos_harness.hosts import Hosts, why_not

pytestmark = pytest.mark.timeout(180)
LEAVES_S = 15.0
"""Much less than the grant, which ends a read that nobody can serve."""


async def test_t15_who_can_be_read_no_more_leaves_at_once() -> None:
    """No read has to run into its deadline to find that out, and no process dies of it."""
    if why := why_not():
        pytest.skip(f"NO HOSTS: {why}")
    with Hosts(WIRES) as hosts:
        async with scene(hosts=hosts, options=PATIENT) as world:
            assert await world.hand_over(prompt("before")) == ("DONE", "")
            await world.ready(prompt("a"))
            hosts.replace("p", "d")
            world.cluster.decode(prompt("a"))
            state, reason = await world.ends("a", within_s=LEAVES_S)
            assert state == "FAILED"
            assert reason in ("AGENT_LOST", "PEER_LOST")  # as the broker hears it from P, or from D
            for name in "bc":
                end = await world.hand_over(prompt(name, timeout_ms=2000, lease_ms=2000))
                assert end == ("EXPIRED", "NOT_PUBLISHED")
            assert world.cluster.found.crashes == []
            await world.replace("P")
            await world.heals()
