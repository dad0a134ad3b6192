"""Agents of a broker that knows its callers: embedded ones, and the daemon."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from agent_harness.handover import destination_memory
from agent_harness.processes import child
from agent_harness.source_main import serve_source
from agent_harness.waiting import WAIT_S
from agent_harness.world import POISON, make_case
from broker.certificates import DOMAIN, P_AND_D, Authority
from restow.agents import Agent, DaemonAgent, SharedMemory, SharedRegion
from restow.agents.daemon.cli import run_agent_daemon
from restow.agents.daemon.server import AgentDaemon
from restow.agents.link.async_agent import AsyncAgent
from restow.agents.link.settings import AgentSettings
from restow.broker.client import Credentials, EngineSession
from restow.broker.client.connection.errors import BrokerCallError
from restow.broker.errors import RestowError
from restow.broker.families import AttentionSpec, EngineSettings, ModelSpec, build_layout
from restow.broker.layout import DType
from restow.broker.planner import Strategy
from restow.broker.server.base.settings import BrokerSettings
from restow.broker.server.serve import RunningBroker, running_broker
from restow.broker.trust.errors import KeyFileError, TokenOverPlaintextError

SMALL = build_layout(
    ModelSpec("m", (AttentionSpec(0, 2, 16, DType.BFLOAT16),)),
    EngineSettings(tp=1, page_tokens=16),
)
SETTINGS = AgentSettings(staging_bytes=1 << 16)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@contextlib.asynccontextmanager
async def guarded(authority: Authority) -> AsyncIterator[RunningBroker]:
    own = authority.issue(server=True)
    settings = BrokerSettings(
        listen="127.0.0.1:0",
        strategy=Strategy.PACK,
        tls_cert=own.certificate,
        tls_key=own.key,
        client_ca=authority.path,
    )
    async with running_broker(settings) as running:
        yield running


def serve_trusted_source(pipe: Connection, broker: str, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    serve_source(pipe, "wide", broker)


def environment_of(credentials: Credentials) -> dict[str, str]:
    return {
        "RESTOW_TLS_CA": str(credentials.tls_ca),
        "RESTOW_TLS_CERT": str(credentials.tls_cert),
        "RESTOW_TLS_KEY": str(credentials.tls_key),
    }


async def test_a_state_arrives_by_what_the_environment_names(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case("wide")
    fields = {field.name: field for field in case.destination.model.fields}
    memory = destination_memory(case)
    environment = environment_of(authority.client(*P_AND_D))
    async with guarded(authority) as running, contextlib.AsyncExitStack() as stack:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        address = running.address
        enter = stack.enter_async_context
        source = await enter(EngineSession("P", "life-1", case.source, address))
        destination = await enter(EngineSession("D", "life-1", case.destination, address))
        process = await enter(child(serve_trusted_source, address, environment))
        for rank, own in memory.items():
            own.data[:] = POISON
            agent = AsyncAgent(address, "D", "life-1", rank, own.regions, AgentSettings(8 << 20))
            await agent.start()
            stack.push_async_callback(agent.close)
        process.tell("h")
        released = source.publish("h", case.src_ids, case.tokens)
        request = destination.request("h", case.dst_ids)
        assert (await asyncio.wait_for(request, WAIT_S)).done
        assert (await asyncio.wait_for(released, WAIT_S)).done
        for rank, own in memory.items():
            assert (own.data == own.expected(fields, case.tokens)).all(), f"rank {rank}"


class SharedRank:
    """Memory of the one rank of `SMALL`, and its region."""

    def __init__(self) -> None:
        (region,) = SMALL.ranks[0].regions
        self.shared = SharedMemory.create(4 * region.page_stride_bytes)
        self.region = SharedRegion(region.name, self.shared.name, 0, 4, region.page_stride_bytes)

    def embedded(self, address: str, credentials: Credentials | None) -> Agent:
        regions = [self.region.memory(self.shared)]
        return Agent(address, "E", "1", 0, regions, settings=SETTINGS, credentials=credentials)


@pytest.fixture
def shared() -> Iterator[SharedRank]:
    rank = SharedRank()
    yield rank
    rank.shared.close()


def session(address: str, authority: Authority) -> EngineSession:
    engine = authority.client(f"{DOMAIN}/tenant/a/engine/E")
    return EngineSession("E", "1", SMALL, address, engine)


async def test_agents_that_may_not_serve(authority: Authority, shared: SharedRank) -> None:
    async with guarded(authority) as running, session(running.address, authority):
        for credentials, expected in (
            (authority.client(f"{DOMAIN}/tenant/a/engine/E"), "FORBIDDEN"),
            (authority.client(f"{DOMAIN}/tenant/a/agent/F"), "FORBIDDEN"),
            (authority.client(f"{DOMAIN}/tenant/b/agent/E"), "NO_WELCOME"),
            (authority.client(), "UNAUTHENTICATED"),
            (Credentials(authority.path), "BROKER_UNREACHABLE"),
            (Credentials(authority.path.with_name("none")), "KEY_FILE_INVALID"),
            (authority.client(f"{DOMAIN}/tenant/a/agent/E"), ""),
        ):
            agent = shared.embedded(running.address, credentials)
            try:
                await asyncio.to_thread(agent.start, 2.0)
                reason = ""
            except RestowError as error:
                reason = error.reason
            await asyncio.to_thread(agent.close)
            assert reason == expected


async def test_a_token_of_an_agent_is_not_sent_in_plaintext(
    shared: SharedRank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RESTOW_TOKEN_FILE", str(tmp_path / "token"))
    with pytest.raises(TokenOverPlaintextError):
        await asyncio.to_thread(shared.embedded("127.0.0.1:1", None).start)


async def test_the_daemon_shows_its_own_certificate(
    authority: Authority, shared: SharedRank, tmp_path: Path
) -> None:
    socket = tmp_path / "agent.sock"
    async with guarded(authority) as running, session(running.address, authority):
        for uri, refused in ((f"{DOMAIN}/tenant/a/agent/F", True), (P_AND_D[1], False)):
            daemon = AgentDaemon(running.address, socket, SETTINGS, authority.client(uri))
            await daemon.start()
            attached = DaemonAgent(socket, "E", "1", 0, [shared.region])
            if refused:
                with pytest.raises(BrokerCallError, match="may not be the agent of engine E"):
                    await asyncio.to_thread(attached.start)
            else:
                await asyncio.to_thread(attached.start)
                assert attached.name in {n for _, n in running.hub.directory.connections.names}
            await asyncio.to_thread(attached.close)
            await daemon.close()


def test_a_daemon_does_not_start_with_files_that_are_wrong(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match=r"authority .* can't be read"):
        run_agent_daemon(None, tmp_path / "s", credentials=Credentials(tmp_path / "none"))
