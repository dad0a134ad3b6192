"""What no stream carries ends none: a caller hears of it, or it is said in parts."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from agent_harness.fake_broker import FakeBroker
from agent_harness.waiting import WAIT_S
from restow.agents import Agent
from restow.agents.memory.regions import RegionMemory
from restow.broker.errors import MessageTooLargeError
from restow.broker.rpc.sizes import MAX_BATCH_BYTES, MAX_TO_BROKER_BYTES

MEMORY = np.zeros(4096, np.uint8)
REGIONS = [RegionMemory("r", MEMORY.ctypes.data, 4, 1024)]


async def test_a_fence_that_can_not_be_sent_is_refused_to_its_caller() -> None:
    async with FakeBroker() as fake:
        agent = Agent(fake.address, "E", "life-1", 3, REGIONS, staging_bytes=1 << 16)
        await asyncio.to_thread(agent.start)
        try:
            stream = await fake.agent("E", 3)
            with pytest.raises(MessageTooLargeError, match="the id of a handoff takes"):
                agent.fence("x" * MAX_TO_BROKER_BYTES)
            agent.fence("next")
            assert (await stream.next()).handoff_id == "next"
            assert not stream.over.is_set()
        finally:
            await asyncio.to_thread(agent.close)


async def test_fences_that_are_too_large_together_are_sent_apart() -> None:
    async with FakeBroker() as fake:
        agent = Agent(fake.address, "E", "life-1", 3, REGIONS, staging_bytes=1 << 16)
        await asyncio.to_thread(agent.start)
        try:
            stream = await fake.agent("E", 3)
            words = "x" * (MAX_BATCH_BYTES // 4)
            for number in range(40):
                agent.fence(f"{number} {words}")
            for number in range(40):
                assert (await stream.next()).handoff_id == f"{number} {words}"
            assert not stream.over.is_set()
        finally:
            await asyncio.to_thread(agent.close)


async def test_an_introduction_that_can_not_be_sent_is_told_where_the_agent_is_started() -> None:
    regions = [RegionMemory("r" * MAX_TO_BROKER_BYTES, MEMORY.ctypes.data, 4, 1024)]
    async with FakeBroker() as fake:
        agent = Agent(fake.address, "E", "life-1", 3, regions, staging_bytes=1 << 16)
        with pytest.raises(MessageTooLargeError, match="the introduction takes"):
            await asyncio.to_thread(agent.start, WAIT_S)
