"""Agents of a broker that knows its callers: embedded ones, and the daemon."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from agent_harness.live import Live
from agent_harness.shared_rank import SMALL, SharedRank
from agent_harness.source_main import serve_source
from broker.certificates import DOMAIN, P_AND_D, Authority
from broker.fakes import broker
from restow.agents import Agent, DaemonAgent
from restow.agents.daemon.cli import run_agent_daemon
from restow.agents.daemon.server import AgentDaemon
from restow.agents.link.settings import AgentSettings
from restow.broker.client import Credentials, EngineSession
from restow.broker.client.connection.errors import BrokerCallError
from restow.broker.errors import RestowError
from restow.broker.planner import Strategy
from restow.broker.server.serve import RunningBroker
from restow.broker.trust.errors import KeyFileError, TokenOverPlaintextError

SETTINGS = AgentSettings(staging_bytes=1 << 16)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@contextlib.asynccontextmanager
async def guarded(authority: Authority) -> AsyncIterator[RunningBroker]:
    own = authority.issue(server=True)
    files = {"tls_cert": own.certificate, "tls_key": own.key, "client_ca": authority.path}
    async with broker("127.0.0.1:0", strategy=Strategy.PACK, **files) as running:
        yield running


def serve_trusted_source(
    pipe: Connection, name: str, broker: str, environment: dict[str, str]
) -> None:
    os.environ.update(environment)
    serve_source(pipe, name, broker)


def environment_of(credentials: Credentials) -> dict[str, str]:
    return {
        "RESTOW_TLS_CA": str(credentials.tls_ca),
        "RESTOW_TLS_CERT": str(credentials.tls_cert),
        "RESTOW_TLS_KEY": str(credentials.tls_key),
    }


async def test_a_state_arrives_by_what_the_environment_names(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = environment_of(authority.client(*P_AND_D))
    async with guarded(authority) as running:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        async with Live("wide", running.address) as both:
            await both.start_engines()
            await both.start_source(serve_trusted_source, environment)
            await both.start_agents()
            await both.check_handoff("h")


def embedded(small: SharedRank, address: str, credentials: Credentials | None) -> Agent:
    memory = [region.memory(small.shared) for region in small.regions]
    return Agent(address, "E", "1", 0, memory, settings=SETTINGS, credentials=credentials)


def session(address: str, authority: Authority) -> EngineSession:
    engine = authority.client(f"{DOMAIN}/tenant/a/engine/E")
    return EngineSession("E", "1", SMALL, address, engine)


async def test_agents_that_may_not_serve(authority: Authority, small: SharedRank) -> None:
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
            agent = embedded(small, running.address, credentials)
            try:
                await asyncio.to_thread(agent.start, 2.0)
                reason = ""
            except RestowError as error:
                reason = error.reason
            await asyncio.to_thread(agent.close)
            assert reason == expected


async def test_a_token_of_an_agent_is_not_sent_in_plaintext(
    small: SharedRank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RESTOW_TOKEN_FILE", str(tmp_path / "token"))
    with pytest.raises(TokenOverPlaintextError):
        await asyncio.to_thread(embedded(small, "127.0.0.1:1", None).start)


async def test_the_daemon_shows_its_own_certificate(
    authority: Authority, small: SharedRank, tmp_path: Path
) -> None:
    socket = tmp_path / "agent.sock"
    async with guarded(authority) as running, session(running.address, authority):
        for uri, refused in ((f"{DOMAIN}/tenant/a/agent/F", True), (P_AND_D[1], False)):
            daemon = AgentDaemon(running.address, socket, SETTINGS, authority.client(uri))
            await daemon.start()
            attached = DaemonAgent(socket, "E", "1", 0, small.regions)
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
