"""A rank of one region, and its agent under a broker whose lines are the test's."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import numpy as np

from agent_harness.fake_broker import AgentStream, FakeBroker
from agent_harness.waiting import WAIT_S
from restow.agents import Agent, AgentSettings
from restow.agents.link.async_agent import AsyncAgent
from restow.agents.memory.regions import RegionMemory

MEMORY = np.zeros(4096, np.uint8)
REGIONS = [RegionMemory("r", MEMORY.ctypes.data, 4, 1024)]
SETTINGS = AgentSettings(staging_bytes=1 << 16, try_metadata=False)


def agent_on(address: str) -> AsyncAgent:
    return AsyncAgent(address, "E", "life-1", 3, REGIONS, SETTINGS)


def embedded_on(address: str, regions: list[RegionMemory] = REGIONS) -> Agent:
    return Agent(address, "E", "life-1", 3, regions, settings=SETTINGS)


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[tuple[FakeBroker, AsyncAgent, AgentStream]]:
    async with FakeBroker() as fake:
        agent = agent_on(fake.address)
        try:
            await agent.start(WAIT_S)
            yield fake, agent, await fake.agent("E", 3)
        finally:
            await agent.close()


@contextlib.asynccontextmanager
async def embedded() -> AsyncIterator[tuple[Agent, AgentStream]]:
    async with FakeBroker() as fake:
        agent = embedded_on(fake.address)
        await asyncio.to_thread(agent.start)
        try:
            yield agent, await fake.agent("E", 3)
        finally:
            await asyncio.to_thread(agent.close)
