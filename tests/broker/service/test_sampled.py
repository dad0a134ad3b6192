"""The token that P sampled reaches a waiting D over gRPC, before its state."""

from __future__ import annotations

import asyncio
from concurrent.futures import CancelledError

import pytest

from broker.fakes import D_BLOCKS, P_BLOCKS, POSITION, Pair, model_layout
from restow.broker.client import BlockingSession, BrokerCallError
from restow.broker.server.serve import RunningBroker

TOKEN = 4711


async def soon(future: asyncio.Future[int]) -> int:
    async with asyncio.timeout(10):
        return await asyncio.shield(future)


async def test_d_hears_the_token_before_p_has_fenced(both: Pair) -> None:
    p, agents, d = both.p, both.p_agents, both.d
    asked = d.request("h", D_BLOCKS, position_tokens=POSITION, takes_sampled_token=True)
    p.publish("h", P_BLOCKS, POSITION, sampled_token=TOKEN)
    assert await soon(asked.sampled) == TOKEN
    assert not asked.done()
    for agent in agents:
        await agent.fence("h")
    assert (await asked).done


async def test_a_demand_that_ends_without_a_token_says_so(both: Pair) -> None:
    p, agents, d = both.p, both.p_agents, both.d
    asked = d.request("h", D_BLOCKS, position_tokens=POSITION, takes_sampled_token=True)
    p.publish("h", P_BLOCKS, POSITION)
    for agent in agents:
        await agent.fence("h")
    assert (await asked).reason == "NOT_SAMPLED"
    with pytest.raises(asyncio.CancelledError):
        await asked.sampled


async def test_threads_hear_it(running: RunningBroker, both: Pair) -> None:
    e = BlockingSession("e", "life", model_layout(), running.address)
    await asyncio.to_thread(e.start)
    try:
        asked = e.request("h", D_BLOCKS, position_tokens=POSITION, takes_sampled_token=True)
        both.p.publish("h", P_BLOCKS, POSITION, sampled_token=TOKEN)
        assert await asyncio.to_thread(asked.sampled.result, 10) == TOKEN
        other = e.request("g", D_BLOCKS, position_tokens=POSITION, takes_sampled_token=True)
        other.cancel()
        error = await asyncio.to_thread(other.sampled.exception, 10)
        assert isinstance(error, CancelledError)
    finally:
        await asyncio.to_thread(e.close)


async def test_what_contradicts_itself_is_refused(both: Pair) -> None:
    p, d = both.p, both.d
    nowhere = d.request("h", D_BLOCKS, takes_sampled_token=True)
    with pytest.raises(BrokerCallError, match="must have position_tokens") as refused:
        await nowhere
    assert refused.value.reason == "ARGUMENT_INVALID"
    with pytest.raises(BrokerCallError, match="must not be negative"):
        await p.publish("g", P_BLOCKS, POSITION, sampled_token=-1)
