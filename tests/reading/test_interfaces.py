"""A host whose network interfaces were taken away: its agents leave, and say so."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from agent_harness.processes import READY, child
from agent_harness.shared_rank import SMALL, small_rank
from agent_harness.waiting import WAIT_S, until
from agent_harness.world import RankMemory
from broker.fakes import broker
from restow.agents import Agent, DaemonAgent
from restow.agents.daemon.cli import run_agent_daemon
from restow.agents.link.settings import AgentSettings
from restow.agents.memory.errors import TransportFailedError
from restow.agents.reading.ucx import Interfaces, InterfaceWatch
from restow.broker.client import AsyncAdminClient, EngineSession
from restow.broker.errors import RestowError

TAKEN = {"taken0": 4711}


def taken_away(cls: type[Interfaces], environment: Mapping[str, str] | None = None) -> Interfaces:
    return cls(TAKEN)


def test_which_interfaces_count() -> None:
    every = Interfaces.found({}).numbers
    present = {name: number for number, name in socket.if_nameindex()}
    assert "lo" not in every
    assert every.items() <= present.items()
    for name in every:
        assert Interfaces.found({"UCX_NET_DEVICES": f"mlx5_0:1,{name}"}).numbers == {
            name: present[name]
        }
    assert Interfaces.found({"UCX_NET_DEVICES": "none0"}).numbers == {}
    assert Interfaces.found({"UCX_TLS": "rc,self"}).numbers == {}


def test_when_they_are_gone() -> None:
    # One interface that is left is enough: reads may go over it.
    assert not Interfaces({}).are_gone
    assert Interfaces(TAKEN).are_gone
    assert Interfaces({"lo": 4711}).are_gone
    assert not Interfaces({"lo": socket.if_nametoindex("lo"), **TAKEN}).are_gone


def test_they_are_looked_at_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, found = [100.0], [Interfaces({})]
    monkeypatch.setattr(Interfaces, "found", lambda: found[0])
    watch = InterfaceWatch(lambda: now_s[0])
    watch.check()
    looked: list[float] = []

    def are_gone(self: Interfaces) -> bool:
        looked.append(now_s[0])
        return True

    monkeypatch.setattr(Interfaces, "are_gone", property(are_gone))
    for _ in range(3):
        watch.check()
    assert looked == []
    now_s[0] += 1.5
    with pytest.raises(TransportFailedError, match="restart this process"):
        watch.check()
    assert looked == [101.5]


async def test_an_agent_leaves_and_tells_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: asyncio.Queue[RestowError] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    memory = RankMemory(SMALL.ranks[0], {"attention": (1,)})
    async with (
        broker() as running,
        EngineSession("E", "1", SMALL, running.address),
        AsyncAdminClient(running.address) as admin,
    ):
        agent = Agent(
            running.address,
            "E",
            "1",
            0,
            memory.regions,
            settings=AgentSettings(staging_bytes=1 << 16),
            on_lost=lambda error: loop.call_soon_threadsafe(heard.put_nowait, error),
        )
        await asyncio.to_thread(agent.start)
        try:
            assert len(await admin.agents()) == 1
            monkeypatch.setattr(Interfaces, "are_gone", property(lambda _: True))
            error = await asyncio.wait_for(heard.get(), WAIT_S)
            assert error.reason == "TRANSPORT_FAILED"
            assert agent.refusal is error
            async with asyncio.timeout(WAIT_S):
                while await admin.agents():  # noqa: ASYNC110 - the broker tells no events
                    await asyncio.sleep(0.05)
        finally:
            await asyncio.to_thread(agent.close)


def serve_until_taken(pipe: Connection, broker: str, path: str) -> None:
    """Run a daemon whose host loses its interfaces at once."""
    setattr(Interfaces, "found", classmethod(taken_away))  # noqa: B010 - mypy knows better
    pipe.send(READY)
    try:
        run_agent_daemon(broker, path)
    except RestowError as error:
        pipe.send(error.reason)


async def test_a_daemon_ends(tmp_path: Path) -> None:
    # The daemon's ranks need another process, not another agent.
    path = tmp_path / "daemon"
    async with (
        broker() as running,
        EngineSession("E", "1", SMALL, running.address),
        child(serve_until_taken, running.address, str(path)) as daemon,
    ):
        await until(path.exists)
        with small_rank() as small:
            agent = DaemonAgent(path, "E", "1", 0, small.regions)
            with contextlib.suppress(RestowError):  # it may come to serve the rank for a moment
                await asyncio.to_thread(agent.start)
            assert await asyncio.to_thread(daemon.receive) == "TRANSPORT_FAILED"
            await asyncio.to_thread(agent.close)
