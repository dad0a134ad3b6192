"""What a daemon shows of its agents, beside real reads."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from agent_harness.fake_broker import FakeBroker
from agent_harness.handover import hand_over, programs, send_execute
from agent_harness.processes import child
from agent_harness.shared_rank import CASE, RANK, SharedRank, attach
from agent_harness.shown_metrics import check_documented, families, fetched
from agent_harness.source_main import serve_source
from agent_harness.waiting import WAIT_S
from restow.agents.daemon.metrics import showing
from restow.agents.daemon.server import AgentDaemon
from restow.broker.planner import Strategy

Found = dict[tuple[str, str], float]
"""By name, and the value of the only label."""


async def metrics(address: str) -> Found:
    return {
        (sample.name.removeprefix("restow_agent_"), next(iter(sample.labels.values()), "")): (
            sample.value
        )
        for family in families(await asyncio.to_thread(fetched, address))
        for sample in family.samples
    }


async def until(address: str, expected: Found) -> Found:
    async with asyncio.timeout(WAIT_S):
        while not expected.items() <= (found := await metrics(address)).items():
            pass
    return found


@contextlib.asynccontextmanager
async def shown(tmp_path: Path, broker: str) -> AsyncIterator[tuple[Path, str]]:
    """Run a daemon in this process; yield its socket and the address of its metrics."""
    socket = tmp_path / "agent.sock"
    daemon = AgentDaemon(broker, socket)
    await daemon.start()
    try:
        async with showing("127.0.0.1:0", lambda: daemon.figures) as address:
            yield socket, address
    finally:
        await daemon.close()


async def test_reads_staging_and_ranks_are_shown_and_counts_outlive_their_agent(
    tmp_path: Path, shared: SharedRank
) -> None:
    async with (
        FakeBroker() as fake,
        shown(tmp_path, fake.address) as (socket, address),
        child(serve_source, "wide", fake.address),
    ):
        assert await asyncio.to_thread(fetched, address, "/healthz") == "ok\n"
        found = await metrics(address)
        nothing = {(name, ""): 0.0 for name in ("ranks", "ranks_connected", "lanes")}
        nothing |= {
            (f"{name}_total", kind): 0.0
            for name in ("reads", "read_bytes", "read_errors")
            for kind in ("nixl", "process_vm_readv", "mapped")
        }
        assert nothing.items() <= found.items()
        agent = attach(socket, shared.regions)
        await asyncio.to_thread(agent.start)
        found = await until(address, {("ranks", ""): 1, ("ranks_connected", ""): 1})
        pool_bytes = 64 << 20
        for pool in ("gather", "scatter"):
            assert found["staging_bytes", pool] == pool_bytes
            assert found["staging_used_bytes", pool] == found["staging_waiting", pool] == 0
        program = programs(CASE, Strategy.SLICES)[RANK]
        settled = await hand_over(fake, CASE, program, 1)
        assert settled.reason == "", settled.detail
        found = await metrics(address)
        assert found["reads_total", "nixl"] > 0
        assert found["read_bytes_total", "nixl"] == settled.bytes
        assert (found["lanes", ""], found["lanes_given_up_total", ""]) == (1, 0)
        await asyncio.to_thread(agent.close)
        found = await until(address, {("ranks", ""): 0, ("lanes", ""): 0})
        assert found["read_bytes_total", "nixl"] == settled.bytes
        assert found["staging_bytes", "gather"] == 0


async def test_a_read_that_fails_is_an_error(tmp_path: Path, shared: SharedRank) -> None:
    async with FakeBroker() as fake, shown(tmp_path, fake.address) as (socket, address):
        async with child(serve_source, "wide", fake.address) as source:
            agent = attach(socket, shared.regions)
            await asyncio.to_thread(agent.start)
            for rank in CASE.source.ranks:
                await fake.agent("P", rank.rank)
            await source.kill()
            program = programs(CASE, Strategy.SLICES)[RANK]
            stream = await send_execute(fake, CASE, program, 1)
            settled = await stream.next()
        assert settled.reason != ""
        found = await metrics(address)
        assert found["read_errors_total", "nixl"] >= 1
        assert found["read_bytes_total", "nixl"] == 0
        await asyncio.to_thread(agent.close)


async def test_the_page_and_the_dashboard_have_what_there_is(tmp_path: Path) -> None:
    async with FakeBroker() as fake, shown(tmp_path, fake.address) as (_, address):
        check_documented(await asyncio.to_thread(fetched, address), "restow_agent_")
