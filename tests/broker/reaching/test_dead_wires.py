"""A connection that dies without a word: both ends notice, and what was ready is not lost."""

from __future__ import annotations

import asyncio

from agent_harness.relay import relayed
from agent_harness.waiting import until
from broker.fakes import (
    D_BLOCKS,
    P_BLOCKS,
    PAGES,
    POSITION,
    FakeAgent,
    engine,
    model_layout,
)
from forked.ports import free_port
from restow.broker.rpc.sizes import SEVERAL_ANSWER_S, SEVERAL_EVERY_S
from restow.broker.server.serve import RunningBroker


async def test_a_lease_outlives_a_wire_that_swallows_what_it_is_given(
    running: RunningBroker,
) -> None:
    # A client of several brokers notices soon.
    lease_ms = int((SEVERAL_EVERY_S + SEVERAL_ANSWER_S + 3) * 1000)
    async with (
        relayed(running.address) as relay,
        engine(f"{relay.address},127.0.0.1:{free_port()}", "p", agents=False) as (p, _),
        engine(running.address, "d") as (d, _),
    ):
        agent = await FakeAgent(p, model_layout(), 0, PAGES, running.address).connect()
        published = p.publish("h", P_BLOCKS, POSITION, lease_ms=lease_ms)
        await agent.fence("h")
        first_lease_s = asyncio.get_running_loop().time() + lease_ms / 1000
        before = relay.connections
        relay.swallow()
        await until(lambda: relay.connections > before)
        await until(lambda: asyncio.get_running_loop().time() > first_lease_s)
        ended = await d.request("h", D_BLOCKS, position_tokens=POSITION)
        assert ended.done, ended
        assert await published == ended
        await agent.drop()
