"""T15: P's network interface is taken away, and another comes in its place."""

from __future__ import annotations

import asyncio

import pytest

from chaos.scene import PATIENT, prompt, scene
from chaos_harness.cluster import WIRES
from chaos_harness.hosts import Hosts, why_not

pytestmark = [pytest.mark.sampled, pytest.mark.timeout(180)]
LEAVES_S = 15.0
"""Much less than the grant, which ends a read that nobody can serve."""
GONE = ("EXPIRED", "NOT_PUBLISHED")
MEANWHILE = {("DONE", ""), ("FAILED", "AGENT_LOST"), ("FAILED", "PEER_LOST")}
"""In the second until P looks: a connection may outlive its interface, or D see that it broke."""


async def test_t15_who_can_be_read_no_more_leaves_at_once() -> None:
    """Check that no read runs into its deadline to find that out, and that no process dies."""
    if why := why_not():
        pytest.skip(f"NO HOSTS: {why}")
    with Hosts(WIRES) as hosts:
        async with scene(hosts=hosts, options=PATIENT) as world:
            assert await world.hand_over(prompt("before")) == ("DONE", "")
            await world.ready(prompt("a"))
            hosts.replace("p", "d")
            world.cluster.decode(prompt("a"))
            ends = [await world.ends("a", within_s=LEAVES_S)]
            async with asyncio.timeout(LEAVES_S):
                while ends[-2:] != [GONE, GONE]:
                    one = prompt(f"b{len(ends)}", timeout_ms=2000, lease_ms=2000)
                    ends.append(await world.hand_over(one))
            assert {*ends} <= {GONE, *MEANWHILE}
            assert world.cluster.found.crashes == []
            await world.replace("P")
            await world.heals()
