"""A daemon that serves an engine's rank out of shared memory."""

from __future__ import annotations

import asyncio
import contextlib
import stat
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from agent_harness.fake_broker import FakeBroker
from agent_harness.handover import hand_over, programs, send_execute
from agent_harness.processes import READY, Child, child
from agent_harness.shared_rank import CASE, RANK, SharedRank, attach
from agent_harness.source_main import serve_daemon, serve_source
from agent_harness.waiting import WAIT_S, until
from agent_harness.world import POISON
from laws.strategies import SENDING
from restow.agents import DaemonAgent, SharedRegion
from restow.agents.daemon.server import AgentDaemon, SocketInUseError
from restow.agents.link.order_desk import OrderTasks
from restow.agents.memory.errors import DaemonUnreachableError
from restow.agents.memory.regions import RegionMemory
from restow.agents.memory.shared_memory import FOLDER, OpenedRegions
from restow.broker.client.connection.errors import BrokerCallError
from restow.broker.errors import AgentMismatchError
from restow.broker.planner import Strategy


@contextlib.asynccontextmanager
async def daemon(tmp_path: Path) -> AsyncIterator[tuple[FakeBroker, Path, Child]]:
    socket = tmp_path / "agent.sock"
    async with (
        FakeBroker() as fake,
        child(serve_daemon, fake.address, str(socket)) as process,
    ):
        yield fake, socket, process


async def test_state_arrives_in_the_engines_memory(tmp_path: Path, shared: SharedRank) -> None:
    async with (
        daemon(tmp_path) as (fake, socket, _),
        child(serve_source, "wide", fake.address),
    ):
        agent = attach(socket, shared.regions)
        await asyncio.to_thread(agent.start)
        assert stat.S_IMODE(socket.stat().st_mode) == 0o600
        stream = await fake.agent("D", RANK)
        assert stream.hello.agent_name == agent.name
        for handoff, strategy in enumerate(one for one in SENDING if one is not Strategy.AUTO):
            shared.memory.data[:] = POISON
            program = programs(CASE, strategy)[RANK]
            settled = await hand_over(fake, CASE, program, handoff)
            assert settled.reason == "", settled.detail
            assert (shared.memory.data == shared.memory.expected(CASE.fields, CASE.tokens)).all()
        await asyncio.to_thread(agent.fence, "h1")
        assert (await stream.next()).handoff_id == "h1"
        program = programs(CASE, Strategy.SLICES)[RANK]
        await send_execute(fake, CASE, program, 99, write_mark=1)
        agent.writes_done(1)
        assert (await stream.next()).reason == ""
        await asyncio.to_thread(agent.close)
        await asyncio.wait_for(stream.over.wait(), WAIT_S)


def serve_own_memory(pipe: Connection, socket: str) -> None:
    """Make an engine's memory, attach it if ``socket`` is given, and send the memory's name."""
    pipe.send(READY)
    rank = SharedRank()
    if socket:
        DaemonAgent(socket, "D", "life-1", RANK, rank.regions).start()
    pipe.send(rank.shared.name)
    with contextlib.suppress(EOFError):
        pipe.recv()


def is_there(name: str) -> bool:
    return Path(FOLDER, name).exists()


async def test_a_killed_engine_is_let_go_with_its_memory_and_that_of_others_stays(
    tmp_path: Path, shared: SharedRank
) -> None:
    async with (
        daemon(tmp_path) as (fake, socket, _),
        child(serve_own_memory, str(socket)) as engine,
    ):
        name = await asyncio.to_thread(engine.receive)
        assert is_there(name)
        stream = await fake.agent("D", RANK)
        await engine.kill()
        await asyncio.wait_for(stream.over.wait(), WAIT_S)
        await until(lambda: not is_there(name))
        assert is_there(shared.shared.name)


async def test_a_daemon_that_starts_removes_what_was_left_without_one(
    tmp_path: Path, shared: SharedRank
) -> None:
    async with child(serve_own_memory, "") as engine, child(serve_own_memory, "") as living:
        left = await asyncio.to_thread(engine.receive)
        kept = await asyncio.to_thread(living.receive)
        await engine.kill()
        async with daemon(tmp_path):
            await until(lambda: not is_there(left))
        assert is_there(kept)
        assert is_there(shared.shared.name)


async def test_a_rank_returns_when_the_daemon_does(tmp_path: Path, shared: SharedRank) -> None:
    async with daemon(tmp_path) as (fake, socket, first):
        agent = attach(socket, shared.regions)
        await asyncio.to_thread(agent.start)
        old_name = agent.name
        await asyncio.to_thread(agent.fence, "h1")
        agent.writes_done(1)
        stream = await fake.agent("D", RANK)
        assert (await stream.next()).handoff_id == "h1"
        await first.kill()
        del fake.streams["D", RANK]
        async with (
            child(serve_daemon, fake.address, str(socket)),
            child(serve_source, "wide", fake.address),
        ):
            stream = await fake.agent("D", RANK)
            assert stream.hello.agent_name != old_name
            assert (await stream.next()).handoff_id == "h1"
            program = programs(CASE, Strategy.SLICES)[RANK]
            await send_execute(fake, CASE, program, 1, write_mark=1)
            assert (await stream.next()).reason == ""
            await asyncio.to_thread(agent.close)


async def test_sigterm_lets_all_ranks_go(tmp_path: Path, shared: SharedRank) -> None:
    async with daemon(tmp_path) as (fake, socket, process):
        agent = attach(socket, shared.regions)
        await asyncio.to_thread(agent.start)
        stream = await fake.agent("D", RANK)
        assert await process.terminate() == 0
        await asyncio.wait_for(stream.over.wait(), WAIT_S)
        assert not socket.exists()
        await asyncio.to_thread(agent.close)


async def test_refusals_of_daemon_and_broker_reach_the_engine(
    tmp_path: Path, shared: SharedRank
) -> None:
    async with daemon(tmp_path) as (fake, socket, _):
        first = shared.regions[0]
        outside = SharedRegion(first.name, first.shared_memory, 0, 10**9, first.page_stride_bytes)
        missing = SharedRegion(first.name, "restow-none", 0, 1, first.page_stride_bytes)
        for regions in ([outside], [missing]):
            with pytest.raises(BrokerCallError) as caught:
                await asyncio.to_thread(attach(socket, regions).start)
            assert caught.value.reason == "REGION_INVALID"
        fake.refusal = AgentMismatchError("region r is not there")
        with pytest.raises(BrokerCallError, match="region r is not there"):
            await asyncio.to_thread(attach(socket, shared.regions).start)


async def test_no_daemon_is_a_typed_error(tmp_path: Path, shared: SharedRank) -> None:
    agent = attach(tmp_path / "nobody.sock", shared.regions)
    with pytest.raises(DaemonUnreachableError, match="restow agent --socket"):
        await asyncio.to_thread(agent.start, 0.5)


async def test_a_socket_has_one_daemon_and_an_old_one_is_no_obstacle(tmp_path: Path) -> None:
    socket = tmp_path / "agent.sock"
    first, second = AgentDaemon("127.0.0.1:1", socket), AgentDaemon("127.0.0.1:1", socket)
    await first.start()
    with pytest.raises(SocketInUseError, match="served by another daemon"):
        await second.start()
    await first.close()
    async with FakeBroker() as fake, child(serve_daemon, fake.address, str(socket)) as process:
        await until(socket.exists)
        await process.kill()
    assert socket.exists(), "kill -9 leaves the socket behind"
    await second.start()
    await second.close()
    socket.write_text("no socket")
    with pytest.raises(SocketInUseError, match="not a socket"):
        await first.start()


async def test_a_rank_is_let_go_whole_though_its_call_is_cancelled_meanwhile(
    tmp_path: Path, shared: SharedRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The engine is killed while the rank is let go: its memory must not be unmapped before.
    began, go_on = asyncio.Event(), asyncio.Event()
    order: list[str] = []
    calls: list[asyncio.Task[None]] = []
    drain, enter, leave = OrderTasks.drain, OpenedRegions.__enter__, OpenedRegions.__exit__

    async def held_drain(self: OrderTasks, *kinds: str) -> None:
        if "execute" in kinds:  # the agent is closed
            began.set()
            await go_on.wait()
            order.append("closed")
        await drain(self, *kinds)

    def entered(self: OpenedRegions) -> list[RegionMemory]:
        call = asyncio.current_task()
        assert call is not None
        calls.append(call)
        return enter(self)

    def left(self: OpenedRegions, *error: object) -> None:
        order.append("unmapped")
        leave(self, *error)

    monkeypatch.setattr(OrderTasks, "drain", held_drain)
    monkeypatch.setattr(OpenedRegions, "__enter__", entered)
    monkeypatch.setattr(OpenedRegions, "__exit__", left)
    socket = tmp_path / "agent.sock"
    async with FakeBroker() as fake:
        served = AgentDaemon(fake.address, socket)
        await served.start()
        try:
            agent = attach(socket, shared.regions)
            await asyncio.to_thread(agent.start)
            stopping = asyncio.create_task(served.close())
            await asyncio.wait_for(began.wait(), WAIT_S)
            await asyncio.to_thread(agent.close)
            await until(lambda: calls[0].cancelling() > 0)
            go_on.set()
            await until(calls[0].done)
            await stopping
        finally:
            go_on.set()
            await served.close()
    assert served.figures.ranks == 0
    assert order == ["closed", "unmapped"]
