"""A host whose network interfaces were taken away: its agents leave, and say so."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from agent_harness.processes import READY, child
from agent_harness.waiting import WAIT_S, until
from restow.agents import Agent, DaemonAgent, SharedMemory, SharedRegion
from restow.agents.daemon.cli import run_agent_daemon
from restow.agents.link.settings import AgentSettings
from restow.agents.memory.errors import TransportFailedError
from restow.agents.reading.ucx import Interfaces, InterfaceWatch, allows_tcp
from restow.broker.client import AsyncAdminClient, EngineSession
from restow.broker.errors import RestowError
from restow.broker.families import AttentionSpec, EngineSettings, ModelSpec, build_layout
from restow.broker.layout import DType
from restow.broker.server.base.settings import BrokerSettings
from restow.broker.server.serve import running_broker

LAYOUT = build_layout(
    ModelSpec("m", (AttentionSpec(0, 2, 16, DType.BFLOAT16),)),
    EngineSettings(tp=1, page_tokens=16),
)
TAKEN = {"taken0": 4711}


def taken_away(cls: type[Interfaces], environment: Mapping[str, str] | None = None) -> Interfaces:
    return cls(TAKEN)


@pytest.fixture
def shared() -> Iterator[tuple[SharedMemory, SharedRegion]]:
    (region,) = LAYOUT.ranks[0].regions
    memory = SharedMemory.create(4 * region.page_stride_bytes)
    yield memory, SharedRegion(region.name, memory.name, 0, 4, region.page_stride_bytes)
    memory.close()


@pytest.mark.parametrize(
    ("transports", "expected"),
    [
        ("all", True),
        ("tcp,self", True),
        ("rc,cuda", False),
        ("^tcp", False),
        ("^cuda_ipc,cma", True),
        ("^all", False),
    ],
)
def test_whether_ucx_may_use_tcp(transports: str, expected: bool) -> None:
    assert allows_tcp(transports) is expected


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


async def test_an_agent_leaves_and_tells_its_engine(
    monkeypatch: pytest.MonkeyPatch, shared: tuple[SharedMemory, SharedRegion]
) -> None:
    memory, region = shared
    heard: asyncio.Queue[RestowError] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    async with (
        running_broker(BrokerSettings(listen="127.0.0.1:0")) as running,
        EngineSession("E", "1", LAYOUT, running.address),
        AsyncAdminClient(running.address) as admin,
    ):
        agent = Agent(
            running.address,
            "E",
            "1",
            0,
            [region.memory(memory)],
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


async def test_a_daemon_ends(tmp_path: Path, shared: tuple[SharedMemory, SharedRegion]) -> None:
    # The daemon's ranks need another process, not another agent.
    _, region = shared
    path = tmp_path / "daemon"
    async with (
        running_broker(BrokerSettings(listen="127.0.0.1:0")) as running,
        EngineSession("E", "1", LAYOUT, running.address),
        child(serve_until_taken, running.address, str(path)) as daemon,
    ):
        await until(path.exists)
        agent = DaemonAgent(path, "E", "1", 0, [region])
        with contextlib.suppress(RestowError):  # it may come to serve the rank for a moment
            await asyncio.to_thread(agent.start)
        assert await asyncio.to_thread(daemon.receive) == "TRANSPORT_FAILED"
        await asyncio.to_thread(agent.close)
