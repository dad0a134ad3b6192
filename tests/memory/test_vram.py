"""Handoffs between the GPU memories of two processes, by NIXL and through the daemon."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import torch

from agent_harness.device_world import DEVICE, KIND, DeviceMemory, serve_device_source
from agent_harness.fake_broker import FakeBroker
from agent_harness.handover import hand_over, programs, send_execute, stage
from agent_harness.processes import child
from agent_harness.source_main import serve_daemon
from agent_harness.waiting import WAIT_S
from agent_harness.world import POISON, Case, make_case
from restow.agents import CudaRegion, DaemonAgent, RegionMemory
from restow.agents.link.async_agent import AsyncAgent
from restow.agents.link.settings import AgentSettings
from restow.broker.planner import Strategy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="NO GPU: reads between GPU memories and CUDA IPC were not tried on hardware",
    ),
]
RANK = 2
SETTINGS = AgentSettings(staging_bytes=8 << 20)


def check_whole(case: Case, memory: DeviceMemory) -> None:
    """Check that every byte is the state's or still poison."""
    host = memory.down()
    fields = {field.name: field for field in case.destination.model.fields}
    wrong = np.flatnonzero(host.data != host.expected(fields, case.tokens))
    assert not len(wrong), f"{len(wrong)} wrong bytes, the first at {wrong[0]}"


@contextlib.asynccontextmanager
async def destination(case: Case, broker: str, rank: int) -> AsyncIterator[DeviceMemory]:
    """Run a rank of D on the GPU, with its agent embedded."""
    layout = next(one for one in case.destination.ranks if one.rank == rank)
    memory = DeviceMemory(layout, case.dst_ids)
    agent = AsyncAgent(broker, "D", "life-1", rank, memory.regions, SETTINGS)
    await agent.start()
    try:
        yield memory
    finally:
        await agent.close()


@pytest.mark.parametrize(
    ("name", "strategies"),
    [
        ("wide", (Strategy.SLICES, Strategy.WHOLE, Strategy.PACK, Strategy.AUTO)),
        ("cast", (Strategy.WHOLE, Strategy.PACK)),
        ("big", (Strategy.SLICES, Strategy.WHOLE, Strategy.PACK)),
    ],
)
async def test_every_byte_arrives_from_another_process_of_the_gpu(
    name: str, strategies: tuple[Strategy, ...]
) -> None:
    case = make_case(name)
    async with FakeBroker() as fake, child(serve_device_source, name, fake.address):
        handoff = 0
        for rank in case.destination.ranks:
            async with destination(case, fake.address, rank.rank) as memory:
                for strategy in strategies:
                    handoff += 1
                    memory.host.data[:] = POISON
                    memory.up()
                    program = programs(case, strategy)[rank.rank]
                    settled = await hand_over(fake, case, program, handoff)
                    assert (settled.handoff, settled.reason) == (handoff, ""), settled.detail
                    assert settled.bytes > 0
                    check_whole(case, memory)


async def test_content_of_device_memory_is_hashed_and_compared() -> None:
    case = make_case("big")
    async with (
        FakeBroker() as fake,
        child(serve_device_source, "big", fake.address),
        destination(case, fake.address, RANK) as memory,
    ):
        ways = (Strategy.SLICES, Strategy.WHOLE, Strategy.PACK)
        for handoff, strategy in enumerate(ways):
            memory.host.data[:] = POISON
            memory.up()
            program = programs(case, strategy)[RANK]
            settled = await hand_over(fake, case, program, handoff, hashed=True)
            assert (settled.reason, settled.compared) == ("", True), settled.detail
            check_whole(case, memory)
        staged = await stage(fake, case, program, 9, hashed=True)
        for one in staged.values():
            one.digest = bytes(16)
        stream = await send_execute(fake, case, program, 9, staged=staged, hashed=True)
        assert (await stream.next()).reason == "DIGEST_MISMATCH"
        host = memory.down()
        fields = {field.name: field for field in case.destination.model.fields}
        mask = host.cleared(fields, case.tokens)
        assert mask.any()
        assert not host.data[mask].any(), "a failed handoff left a snapshot behind"


async def test_a_fence_waits_for_the_work_before_its_event() -> None:
    page = torch.zeros(4, 1 << 20, dtype=torch.uint8, device=DEVICE)
    region = RegionMemory("r", page.data_ptr(), 4, 1 << 20, KIND)
    async with FakeBroker() as fake:
        agent = AsyncAgent(fake.address, "E", "life-1", 3, [region], SETTINGS)
        await agent.start()
        try:
            stream = await fake.agent("E", 3)
            torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]  # cycles: about 0.1 s
            page.fill_(7)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            agent.fence("h", event)
            agent.fence("at once")
            assert (await stream.next()).handoff_id == "at once"
            assert (await stream.next()).handoff_id == "h"
            assert event.query()  # type: ignore[no-untyped-call]
        finally:
            await agent.close()


async def test_the_daemon_fills_an_engines_gpu_memory(tmp_path: Path) -> None:
    case, socket = make_case("wide"), tmp_path / "agent.sock"
    layout = next(rank for rank in case.destination.ranks if rank.rank == RANK)
    memory = DeviceMemory(layout, case.dst_ids)
    async with (
        FakeBroker() as fake,
        child(serve_daemon, fake.address, str(socket)),
        child(serve_device_source, "wide", fake.address),
    ):
        shared = [CudaRegion.of(region) for region in memory.regions]
        assert all(region.offset_bytes for region in shared), "not the allocation's beginning"
        agent = DaemonAgent(socket, "D", "life-1", RANK, shared)
        await asyncio.to_thread(agent.start)
        stream = await fake.agent("D", RANK)
        for handoff, strategy in enumerate((Strategy.SLICES, Strategy.WHOLE, Strategy.PACK)):
            memory.host.data[:] = POISON
            memory.up()
            program = programs(case, strategy)[RANK]
            settled = await hand_over(fake, case, program, handoff)
            assert settled.reason == "", settled.detail
            check_whole(case, memory)
        await asyncio.to_thread(agent.close)
        await asyncio.wait_for(stream.over.wait(), WAIT_S)


async def test_a_source_behind_the_daemon_packs_into_memory_of_the_daemons_own(
    tmp_path: Path,
) -> None:
    # The driver may refuse to hand on memory that it opened, so a peer reads the staging.
    case, socket = make_case("wide"), tmp_path / "agent.sock"
    async with (
        FakeBroker() as fake,
        child(serve_daemon, fake.address, str(socket)),
        child(serve_device_source, "wide", fake.address, str(socket)),
        destination(case, fake.address, RANK) as memory,
    ):
        settled = await hand_over(fake, case, programs(case, Strategy.PACK)[RANK], 1)
        assert settled.reason == "", settled.detail
        check_whole(case, memory)
