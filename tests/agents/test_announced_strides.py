"""What an agent announces of its pages must be what its engine's layout says of them."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from agent_harness.shared_rank import CASE, SharedRank, attach
from agent_harness.world import RankMemory
from broker.fakes import broker
from restow.agents import SharedMemory
from restow.agents.daemon.server import AgentDaemon
from restow.agents.link.async_agent import AsyncAgent
from restow.agents.memory.regions import RegionMemory
from restow.broker.client import EngineSession
from restow.broker.client.connection.errors import BrokerCallError

RANK = CASE.destination.ranks[0]
LAST = RANK.regions[-1]


@contextlib.asynccontextmanager
async def registered() -> AsyncIterator[str]:
    """Yield the address of a broker that knows D."""
    async with (
        broker() as running,
        EngineSession("D", "life-1", CASE.destination, running.address),
    ):
        yield running.address


@contextlib.asynccontextmanager
async def agent_of(
    address: str, rank: int, regions: Sequence[RegionMemory]
) -> AsyncIterator[AsyncAgent]:
    agent = AsyncAgent(address, "D", "life-1", rank, regions)
    try:
        yield agent
    finally:
        await agent.close()


@pytest.mark.parametrize("times", [0.5, 2], ids=["pages without their padding", "twice the size"])
async def test_an_agent_with_other_strides_is_refused(times: float) -> None:
    memory = RankMemory(RANK, CASE.dst_ids)
    stride = int(LAST.page_stride_bytes * times)
    *others, last = memory.regions
    pages = last.length_bytes // stride  # the same bytes, cut into pages of another stride
    regions = [*others, replace(last, page_count=pages, page_stride_bytes=stride)]
    async with registered() as address, agent_of(address, 0, regions) as agent:
        with pytest.raises(BrokerCallError) as caught:
            await agent.start()
    assert caught.value.reason == "AGENT_REGIONS_MISMATCH"
    words = f"region {last.name}: the agent's page stride is {stride} bytes, but "
    assert words + f"the layout's is {LAST.page_stride_bytes}" in caught.value.message


async def test_a_rank_that_is_given_the_memory_of_another_is_refused() -> None:
    # Each rank maps the same shared memory at an address of its own, as processes do.
    with SharedRank(RANK) as first, SharedMemory.attach(first.shared.name) as again:
        there = (ctypes.c_uint8 * again.size_bytes).from_address(again.address)
        data = np.ctypeslib.as_array(there)
        second = RankMemory(CASE.destination.ranks[1], CASE.dst_ids, data)
        async with (
            registered() as address,
            agent_of(address, 0, first.memory.regions) as right,
            agent_of(address, 1, second.regions) as wrong,
        ):
            await right.start()
            with pytest.raises(BrokerCallError) as caught:
                await wrong.start()
    assert caught.value.reason == "REGIONS_OVERLAP"
    name = RANK.regions[0].name
    assert f"rank 0, region {name} overlap bytes" in caught.value.message
    assert f"of rank 1, region {name}" in caught.value.message


async def test_a_rank_of_a_daemon_with_other_strides_is_refused(
    tmp_path: Path, shared: SharedRank
) -> None:
    *others, last = shared.regions
    regions = [*others, replace(last, page_count=1, page_stride_bytes=2 * last.page_stride_bytes)]
    async with registered() as address:
        daemon = AgentDaemon(address, tmp_path / "agent.sock")
        await daemon.start()
        try:
            with pytest.raises(BrokerCallError, match="the agent's page stride"):
                await asyncio.to_thread(attach(tmp_path / "agent.sock", regions).start)
        finally:
            await daemon.close()
