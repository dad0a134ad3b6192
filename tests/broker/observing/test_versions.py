"""Versions with their commit, as engines and agents say them and operators see them."""

from __future__ import annotations

import asyncio
import io
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from broker.fakes import PAGES, FakeAgent, Pair, engine, model_layout
from restow.broker.cli.main import app
from restow.broker.client import AdminClient, AsyncAdminClient, EngineSession
from restow.broker.client.connection.errors import BrokerCallError
from restow.broker.doctor.broker_view import judge_versions, look_at_broker
from restow.broker.server.serve import RunningBroker
from restow.broker.versions import commit_of, own_version, written_commit
from restow.v1 import admin_pb2 as pb

ROOT = Path(__file__).resolve().parents[3]
OTHER = "0.0.9+g0123456789ab"
needs_git = pytest.mark.skipif(
    shutil.which("git") is None or not (ROOT / ".git").exists(), reason="needs a checkout and git"
)


async def shown(*arguments: str) -> str:
    return (await asyncio.to_thread(CliRunner().invoke, app, list(arguments))).output


async def test_operators_see_who_runs_what(
    running: RunningBroker, both: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = ("--broker", running.address)
    async with AsyncAdminClient(running.address) as client:
        assert (await client.status()).version == own_version()
        assert [one.version for one in await client.engines()] == [own_version()] * 2
    assert "Mixed versions" not in await shown("engines", *where)
    with AdminClient(running.address) as blocking:
        told = await asyncio.to_thread(lambda: list(look_at_broker(blocking)))
    assert [one.verdict for one in told if one.subject == "versions"] == ["ok"]

    await both.p_agents[0].drop()
    late = FakeAgent(both.p, model_layout(2), 0, PAGES)
    late.hello.version = OTHER
    await late.connect()
    with monkeypatch.context() as patch:
        patch.setattr("restow.broker.client.engine.session.own_version", lambda: OTHER)
        async with engine(running.address, "old", agents=False):
            assert f"Mixed versions: old of {OTHER}; " in await shown("engines", *where)
            agents = await shown("agents", *where)
            assert f"p.0 of {OTHER}" in agents
            assert "d.0, p.1 of an unknown version" in agents
            async with AsyncAdminClient(running.address) as client:
                [told_one] = judge_versions(
                    own_version(), await client.engines(), await client.agents()
                )
    await late.drop()
    assert told_one.verdict == "warn"
    assert f"engine old {OTHER}, agent p.0 {OTHER}" in told_one.words


def test_nobody_has_said_what_he_runs() -> None:
    [found] = judge_versions("1", [pb.EngineInfo(engine_id="e")], [])
    assert found.verdict == "ok"
    assert not list(judge_versions("1", [], []))


async def test_a_version_that_is_none(running: RunningBroker, both: Pair) -> None:
    for version in ("\x1b[31m1", "1 2", "x" * 65, "1\n"):
        agent = FakeAgent(both.d, model_layout(1), 0, PAGES)
        agent.hello.version = version
        with pytest.raises(BrokerCallError, match="letters, digits"):
            await agent.connect()
        wrong = EngineSession("e", "1", model_layout(), running.address)
        wrong._stream.message.version = version
        with pytest.raises(BrokerCallError, match="letters, digits"):
            await wrong.start()


def test_a_commit_that_was_written_down(tmp_path: Path) -> None:
    assert written_commit(tmp_path) == ""
    (tmp_path / "commit.txt").write_text("$Format:%H$\n")
    assert written_commit(tmp_path) == ""
    (tmp_path / "commit.txt").write_text("a" * 40 + "\n")
    assert written_commit(tmp_path) == "a" * 40
    (tmp_path / "built_commit.txt").write_text("b" * 40 + "\n")
    assert written_commit(tmp_path) == "b" * 40


@needs_git
def test_a_checkout_knows_its_commit_and_nobody_elses(tmp_path: Path) -> None:
    commit = commit_of(ROOT)
    assert len(commit) == 40
    assert own_version().endswith(f"+g{commit[:12]}")
    for command in (["init", "-q"], ["-c", "user.name=a", "-c", "user.email=a", "commit", "-q"]):
        more = ["--allow-empty", "-m", "x"] if "commit" in command else []
        subprocess.run(["git", "-C", str(tmp_path), *command, *more], check=True)  # noqa: S607
    assert commit_of(tmp_path) == ""


@needs_git
def test_an_archive_has_its_commit_written_down(tmp_path: Path) -> None:
    path = "broker/restow/broker"
    command = ["git", "-C", str(ROOT), "archive", "HEAD", path]
    made = subprocess.run(command, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(made)) as archive:
        archive.extractall(tmp_path, filter="data")
    assert written_commit(tmp_path / path) == commit_of(ROOT)
