"""`restow doctor` finds what is wrong, says what to do, and calls nothing wrong that is not."""

from __future__ import annotations

import asyncio
import errno
import platform
import resource
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest

from broker.certificates import P_AND_D, Authority
from broker.fakes import PAGES, FakeAgent, broker, engine, model_layout, pair, silent
from broker.guarded import ask, guarded, operator
from cli.typed import document, document_aside, typed, typed_aside
from restow.broker.client import AdminClient, Credentials
from restow.broker.doctor.broker_view import (
    all_pairs,
    judge_engine,
    judge_pair,
    look_at_broker,
    look_at_pairs,
)
from restow.broker.doctor.local import (
    DAY_S,
    Finding,
    Verdict,
    files,
    judge_end,
    judge_failure,
    judge_ucx,
    locked_memory,
    look_at_shown,
    look_at_trust,
    shared_memory,
    start_nixl,
)
from restow.broker.trust.errors import KeyFileError
from restow.broker.trust.key_files import end_of
from restow.v1 import admin_pb2 as pb
from restow.v1 import agent_link_pb2 as link

ENDLESS = resource.RLIM_INFINITY


def engine_info(**more: object) -> pb.EngineInfo:
    """Return an engine about which nothing is wrong, but for what is given."""
    well = {"engine_id": "e", "ranks": 2, "agents": 2, "session": True, "revision": "v1"}
    return pb.EngineInfo(**well | more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("finding", "verdict"),
    [
        (files((256, 512)), "bad"),
        (files((1024, 524_288)), "warn"),
        (files((65_536, ENDLESS)), "ok"),
        (files((ENDLESS, ENDLESS)), "ok"),
        (locked_memory(8 << 20), "warn"),
        (locked_memory(ENDLESS), "ok"),
        (shared_memory(None), "bad"),
        (shared_memory(64 << 20), "warn"),
        (shared_memory(8 << 30), "ok"),
        (judge_failure(errno.EPERM, "2\n", "Seccomp:\t2\nCapEff:\t0\n"), "warn"),
        (judge_failure(errno.ESRCH, "0\n", ""), "bad"),
        (judge_ucx([]), "bad"),
        (judge_ucx(["/a/nixl.libs/libucp-1.so.0"]), "ok"),
        (judge_ucx(["/usr/lib/libucp.so.0"]), "warn"),
        (judge_ucx(["/a/nixl.libs/libucp-1.so.0", "/usr/lib/libucp.so.0"]), "bad"),
        (judge_end("c", 99.0, 100.0), "bad"),
        (judge_end("c", 6 * DAY_S, 0.0), "warn"),
        (judge_end("c", 8 * DAY_S, 0.0), "ok"),
        (judge_engine(engine_info(agents=1)), "bad"),
        (judge_engine(engine_info(session=False)), "warn"),
        (judge_engine(engine_info(revision="")), "warn"),
        (judge_engine(engine_info()), "ok"),
        (judge_engine(engine_info(draining=True)), "warn"),
        (judge_pair("p", "d", pb.ProbePairResponse(transport="rc_mlx5/mlx5_0:1")), "ok"),
        (judge_pair("p", "d", pb.ProbePairResponse(transport="tcp/eth0")), "warn"),
        (judge_pair("p", "d", pb.ProbePairResponse(reason="READ_FAILED")), "bad"),
    ],
)
def test_verdicts(finding: Finding, verdict: str) -> None:
    assert finding.verdict == verdict
    assert bool(finding.next_step) == (verdict != "ok")


def test_every_two_engines_of_one_model() -> None:
    engines = [
        pb.EngineInfo(engine_id="a", model="m", agents=1),
        pb.EngineInfo(engine_id="b", model="m", agents=1),
        pb.EngineInfo(engine_id="c", model="other", agents=1),
        pb.EngineInfo(engine_id="d", model="m", revision="other", agents=1),
        pb.EngineInfo(engine_id="e", model="m"),
    ]
    assert all_pairs(engines) == [("a", "b"), ("b", "a")]


def test_nixl_starts_here_with_one_ucx() -> None:
    found = start_nixl()
    assert (found.verdict, found.subject) == (Verdict.OK, "NIXL"), found


@pytest.mark.parametrize("name", ["UCX_TLS", "UCX_NET_DEVICES"])
def test_nixl_that_does_not_start(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "nothing_like_it")
    found = start_nixl()
    assert found.verdict is Verdict.BAD
    assert "does not start" in found.words
    assert f"{name}='nothing_like_it'" in found.words


SYSTEM_CALL = {"x86_64": 310, "aarch64": 270}.get(platform.machine())
FILTERED = """
import ctypes, struct
# Load the call's number; if it is process_vm_readv's, EPERM; else allow.
load, ours = (0x20, 0, 0, 0), (0x15, 0, 1, %d)
refuse, allow = (6, 0, 0, 0x50001), (6, 0, 0, 0x7FFF0000)
steps = struct.pack("HBBI" * 4, *load, *ours, *refuse, *allow)
held = ctypes.create_string_buffer(steps)
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", 4, ctypes.addressof(held)))
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, program) == 0
from restow.broker.doctor.local import look_at_process_reading
found = look_at_process_reading()
print(found.verdict, found.words)
"""


@pytest.mark.skipif(SYSTEM_CALL is None, reason="the number of a system call is not known here")
def test_reading_that_a_seccomp_profile_forbids() -> None:
    command = [sys.executable, "-c", FILTERED % SYSTEM_CALL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("warn may not be read (Operation not permitted): ")
    assert "a seccomp filter is on" in done.stdout


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def test_until_when_a_certificate_is_good(authority: Authority) -> None:
    lasts = timedelta(days=30)
    for one in (authority.issue(*P_AND_D, lasts=lasts), authority.issue(server=True, lasts=lasts)):
        ends_s = end_of(one.certificate, one.key)
        assert ends_s is not None
        assert abs(ends_s - time.time() - 30 * DAY_S) < 120
    late = authority.issue(*P_AND_D, lasts=-timedelta(hours=1))
    with pytest.raises(KeyFileError, match="has expired"):
        end_of(late.certificate, late.key)


def test_files_of_trust(authority: Authority, tmp_path: Path) -> None:
    def judged(credentials: Credentials) -> list[Verdict]:
        return [one.verdict for one in look_at_trust(credentials)]

    one = authority.issue(*P_AND_D, lasts=timedelta(days=30))
    late = authority.issue(*P_AND_D, lasts=-timedelta(hours=1))
    assert judged(Credentials()) == [Verdict.WARN]
    # The authority itself is good for a day.
    good = Credentials(authority.path, one.certificate, one.key)
    assert judged(good) == [Verdict.OK, Verdict.WARN, Verdict.OK]
    assert judged(Credentials(authority.path, late.certificate, late.key)) == [Verdict.BAD]
    assert judged(Credentials(authority.path, one.certificate, late.key)) == [Verdict.BAD]
    assert judged(Credentials(tmp_path / "none")) == [Verdict.BAD]


async def test_the_certificate_that_the_broker_shows(authority: Authority) -> None:
    # Only the doctor tells an operator: the broker goes on with the streams that it has.
    async with guarded(authority) as running:
        credentials = operator(authority, None)

        def judged(who: Credentials) -> list[Finding]:
            return list(look_at_shown(running.address, who))

        [found] = await asyncio.to_thread(judged, credentials)
        assert (found.verdict, found.subject) == (Verdict.WARN, "certificate of the broker")
        assert await asyncio.to_thread(judged, Credentials()) == []
    assert await asyncio.to_thread(judged, credentials) == []
    assert list(look_at_shown("broker..example:7350", credentials)) == []


@pytest.mark.parametrize("name", ["tls_key", "token_file"])
def test_a_secret_that_others_may_read_or_write(
    authority: Authority, tmp_path: Path, name: str
) -> None:
    one, token = authority.issue(*P_AND_D, lasts=timedelta(days=30)), tmp_path / "token"
    token.write_text("restow_secret")
    token.chmod(0o600)
    files = {"tls_cert": one.certificate, "tls_key": one.key, "token_file": token}
    credentials = Credentials(authority.path, **files)
    assert not [
        found for found in look_at_trust(credentials) if found.subject.startswith("secret ")
    ]
    files[name].chmod(0o644)
    [told] = [found for found in look_at_trust(credentials) if found.subject.startswith("secret ")]
    assert (told.verdict, told.subject) == (Verdict.WARN, f"secret {files[name]}")
    files[name].chmod(0o622)
    [refused] = look_at_trust(credentials)
    assert refused.verdict is Verdict.BAD
    assert f"chmod o-w {files[name]}" in refused.words


def test_here_asks_no_broker() -> None:
    told = document("doctor", "--here", "--broker", "127.0.0.1:1")
    assert told["sound"]
    subjects = {found["subject"] for found in told["findings"]}
    assert {"open files", "shared memory", "packages", "NIXL", "trust"} <= subjects
    assert "broker" not in subjects


@pytest.fixture
def without_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the agents' packages missing, as where a broker alone is installed."""
    monkeypatch.setitem(sys.modules, "restow.agents", None)


@pytest.mark.usefixtures("without_agents")
def test_no_broker_is_bad() -> None:
    result = typed("doctor", "--broker", "127.0.0.1:1")
    assert result.exit_code == 4
    assert "no broker answers at 127.0.0.1:1" in result.stdout
    assert "NIXL: not installed here: a broker can run here, but no agent" in result.stdout


@pytest.mark.parametrize(
    "options",
    [("--here", "--pair", "all"), ("--pair", "p"), ("--pair", "p:"), ("--here", "-o", "name")],
    ids=str,
)
def test_wrong_usage_is_told_before_anything_is_looked_at(options: tuple[str, ...]) -> None:
    result = typed("doctor", *options, "--broker", "127.0.0.1:1")
    assert (result.exit_code, result.stdout) == (2, "")


async def test_a_house_that_is_whole() -> None:
    async with broker() as running, pair(running.address, 2, 1) as both:
        await both.hand_over("h")
        told = await document_aside("doctor", "--pair", "all", "--broker", running.address)
        found = {one["subject"]: one["verdict"] for one in told["findings"]}
        assert [found[one] for one in ("broker", "audit", "engine p", "engine d")] == ["ok"] * 4
        assert found["content"] == "warn", "the broker does not require it"
        # What the agents of this test say they read over.
        assert (found["pair p:d"], found["pair d:p"]) == ("warn", "warn")
        assert judge_pair("p", "d", await ask(running.address, Credentials(), p_and_d)).words == (
            "reads over tcp/eth0 (zero-copy)"
        )


def p_and_d(client: AdminClient) -> pb.ProbePairResponse:
    return client.probe_pair("p", "d")


def refuses(order: link.AgentOrder) -> list[link.AgentMessage]:
    probed = link.Probed(number=order.probe.number, reason="READ_FAILED", detail="no way there")
    return [link.AgentMessage(probed=probed)] if order.WhichOneof("body") == "probe" else []


async def bad_words(address: str, *pairs: tuple[str, str]) -> set[str]:
    """Return what is bad about a broker, its engines and some pairs."""

    def look(client: AdminClient) -> list[Finding]:
        return [*look_at_broker(client), *look_at_pairs(client, pairs)]

    found = await ask(address, Credentials(), look)
    return {f"{it.subject}: {it.words}" for it in found if it.verdict is Verdict.BAD}


async def test_what_is_wrong_is_named() -> None:
    async with broker() as running, pair(running.address, 2, 1) as both:
        both.d_agents[0].answers = refuses
        async with engine(running.address, "half", 2, agents=False) as (session, _):
            alone = await FakeAgent(session, model_layout(2), 1, PAGES).connect()
            assert await bad_words(running.address, ("p", "d"), ("p", "who")) == {
                "engine half: 1 of 2 agents are connected: its handoffs wait",
                "pair p:d: rank 0 can't read from rank 0: READ_FAILED: no way there",
                "pair p:who: engine who is not registered: `restow engines` lists all engines",
            }
            await alone.drop()


@pytest.mark.usefixtures("without_agents")
async def test_an_agent_that_is_lost_meanwhile() -> None:
    async with broker() as running, pair(running.address, 1, 1) as both:
        both.d_agents[0].answers = silent
        arguments = ("doctor", "--pair", "p:d", "--broker", running.address)
        asked = asyncio.create_task(typed_aside(*arguments))
        await both.d_agents[0].order("probe")
        await both.d_agents[0].drop()
        result = await asked
        assert result.exit_code == 4
        assert "AGENT_LOST" in result.stdout


async def test_an_operator_of_one_tenant(authority: Authority) -> None:
    async with guarded(authority) as running:
        own = authority.client("spiffe://test/restow/tenant/a/operator")
        found = await ask(running.address, own, lambda client: [*look_at_broker(client)])
        (audit,) = [one for one in found if one.subject == "audit"]
        assert audit.verdict is Verdict.OK
        assert audit.words.startswith("left out: it needs an operator of all tenants")
