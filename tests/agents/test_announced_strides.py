"""What an agent announces of its pages must be what its engine's layout says of them."""

from __future__ import annotations

import asyncio
import ctypes
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from agent_harness.world import RankMemory, make_case
from restow.agents import DaemonAgent, SharedMemory, SharedRegion
from restow.agents.daemon.server import AgentDaemon
from restow.agents.link.async_agent import AsyncAgent
from restow.agents.memory.regions import RegionMemory
from restow.broker.client import EngineSession
from restow.broker.client.connection.errors import BrokerCallError
from restow.broker.server.base.settings import BrokerSettings
from restow.broker.server.serve import running_broker

CASE = make_case("wide")
RANK = CASE.destination.ranks[0]
LAST = RANK.regions[-1]


def relaid(region: RegionMemory, stride_bytes: int) -> RegionMemory:
    """Return a region of the same bytes, cut into pages of another stride."""
    pages = region.length_bytes // stride_bytes
    return replace(region, page_count=pages, page_stride_bytes=stride_bytes)


@pytest.mark.parametrize("times", [0.5, 2], ids=["pages without their padding", "twice the size"])
async def test_an_agent_with_other_strides_is_refused(times: float) -> None:
    memory = RankMemory(RANK, CASE.dst_ids)
    stride = int(LAST.page_stride_bytes * times)
    *others, last = memory.regions
    agent_regions = [*others, relaid(last, stride)]
    async with (
        running_broker(BrokerSettings(listen="127.0.0.1:0")) as broker,
        EngineSession("D", "life-1", CASE.destination, broker.address),
    ):
        agent = AsyncAgent(broker.address, "D", "life-1", RANK.rank, agent_regions)
        try:
            with pytest.raises(BrokerCallError) as caught:
                await agent.start()
        finally:
            await agent.close()
    assert caught.value.reason == "AGENT_REGIONS_MISMATCH"
    words = f"region {last.name}: the agent's page stride is {stride} bytes, but "
    assert words + f"the layout's is {LAST.page_stride_bytes}" in caught.value.message


async def test_a_rank_that_is_given_the_memory_of_another_is_refused() -> None:
    # Each rank maps the same shared memory at an address of its own, as processes do.
    ranks = CASE.destination.ranks[:2]
    size_bytes = RankMemory(ranks[0], CASE.dst_ids).size_bytes
    with (
        SharedMemory.create(size_bytes) as shared,
        SharedMemory.attach(shared.name) as again,
    ):
        agents = []
        async with (
            running_broker(BrokerSettings(listen="127.0.0.1:0")) as broker,
            EngineSession("D", "life-1", CASE.destination, broker.address),
        ):
            for rank, mapped in zip(ranks, (shared, again), strict=True):
                there = (ctypes.c_uint8 * size_bytes).from_address(mapped.address)
                data = np.ctypeslib.as_array(there)
                regions = RankMemory(rank, CASE.dst_ids, data).regions
                agents.append(AsyncAgent(broker.address, "D", "life-1", rank.rank, regions))
            try:
                await agents[0].start()
                with pytest.raises(BrokerCallError) as caught:
                    await agents[1].start()
            finally:
                for agent in agents:
                    await agent.close()
    assert caught.value.reason == "REGIONS_OVERLAP"
    first = RANK.regions[0].name
    assert f"rank 0, region {first} overlap bytes" in caught.value.message
    assert f"of rank 1, region {first}" in caught.value.message


async def test_a_rank_of_a_daemon_with_other_strides_is_refused(tmp_path: Path) -> None:
    memory = RankMemory(RANK, CASE.dst_ids)
    with SharedMemory.create(memory.size_bytes) as shared:
        regions = [
            SharedRegion(
                region.name,
                shared.name,
                memory.offsets[region.name],
                memory.page_counts[region.name],
                region.page_stride_bytes,
            )
            for region in RANK.regions
        ]
        last = regions[-1]
        regions[-1] = replace(last, page_count=1, page_stride_bytes=2 * last.page_stride_bytes)
        async with (
            running_broker(BrokerSettings(listen="127.0.0.1:0")) as broker,
            EngineSession("D", "life-1", CASE.destination, broker.address),
        ):
            daemon = AgentDaemon(broker.address, tmp_path / "agent.sock")
            await daemon.start()
            agent = DaemonAgent(tmp_path / "agent.sock", "D", "life-1", RANK.rank, regions)
            try:
                with pytest.raises(BrokerCallError, match="the agent's page stride"):
                    await asyncio.to_thread(agent.start)
            finally:
                await daemon.close()
