"""The last release and this one work together, and one follows the other under load."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from itertools import product
from pathlib import Path

import pytest

from agent_harness.waiting import until
from chaos_harness.lives import BrokerLife
from etcd_harness.cluster import running_etcd
from forked.ports import free_port
from releases.scene import Traffic, engines, traffic
from releases.trees import OLD, RELEASED, ROOT, commit_of, found, installed, source, version
from restow.broker.client import AdminClient
from restow.broker.errors import RestowError

NEW = version()
OF_FORM_2 = "2e2665d2a040aa0f54aad5ba89b2d447aeec01ef"
"""The last commit whose agents read programs of form 2."""
PATIENT = ("--grant-s", "60", "--settle-grace-s", "20")
"""So that a machine that is busy with other tests fails no read."""
LEASE_S, WITHIN_S = 1.0, 60.0
EACH = 10
"""Handoffs of each kind that a test waits for."""


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return where each of the two releases is installed."""
    folder = tmp_path_factory.mktemp("releases")
    old = installed(source(commit_of(OLD), folder / "source"), folder / OLD)
    return {OLD: old, NEW: installed(ROOT, folder / NEW)}


@contextlib.asynccontextmanager
async def broker(
    folder: Path, tree: Path, address: str, *options: str
) -> AsyncIterator[BrokerLife]:
    """Run a broker of a release; it may be gone at the end."""
    log = folder / f"{address.rpartition(':')[2]}.log"
    one = BrokerLife("", address, log, {"PYTHONPATH": f"{tree}"}, (*PATIENT, *options))
    try:
        yield one
    finally:
        if one.alive:
            await asyncio.to_thread(one.end, signal.SIGKILL)


def brokers_at(address: str) -> dict[str, str]:
    """Return the leader's address and version, and the number of brokers, as one broker knows."""
    with contextlib.suppress(RestowError), AdminClient(address) as client:
        told = client.brokers()
        leader = told.membership.leader
        if leader:
            with AdminClient(leader) as at_leader:
                version = at_leader.status().version
            return {"leader": leader, "version": version, "brokers": f"{len(told.brokers)}"}
    return {}


def release_of(version: str) -> str:
    return version.partition("+")[0]


def test_the_image_of_the_contract_is_that_of_the_release(tmp_path: Path) -> None:
    tree = source(commit_of(OLD), tmp_path / "source", "proto", "buf.yaml")
    image = tmp_path / "image.binpb"
    buf = Path(sys.executable).with_name("buf")
    subprocess.run([buf, "build", "--exclude-source-info", "-o", image], cwd=tree, check=True)
    assert image.read_bytes() == (RELEASED / f"{OLD}.binpb").read_bytes()


@pytest.mark.parametrize("release", [OLD, NEW])
async def test_engines_of_both_releases_hand_over_at_a_broker_of_either(
    release: str, trees: dict[str, Path], tmp_path: Path
) -> None:
    address = f"127.0.0.1:{free_port()}"
    gathering = ("--strategy", "pack")  # so that agents of P have orders too
    async with (
        broker(tmp_path, trees[release], address, *gathering),
        engines(tmp_path, address, trees) as made,
    ):
        serving = await asyncio.gather(*(made.start(*one) for one in product("pd", (OLD, NEW))))
        with AdminClient(address) as client:
            assert release_of(client.status().version).startswith(release)
            told = [(one.engine_id, one.version) for one in client.engines()]
            told += [(one.engine_id, one.version) for one in client.agents()]
            assert len(told) == 4 + 6
            for engine_id, of in told:
                assert release_of(of).startswith(engine_id.partition("-")[2])
        one = Traffic(serving)
        p_side, d_side = serving[:2], serving[2:]
        for _ in range(EACH):
            await asyncio.gather(*(one.hand_over(p, d) for p, d in product(p_side, d_side)))
        assert one.failed == []
        assert one.done == dict.fromkeys(product((OLD, NEW), (OLD, NEW)), EACH)


async def test_no_handoff_fails_while_brokers_and_then_engines_are_upgraded(
    trees: dict[str, Path], tmp_path: Path
) -> None:
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        etcd = await enter(running_etcd(tmp_path, 1, heartbeat_ms=50, election_ms=500))
        fleet = ("--etcd", ",".join(etcd.endpoints), "--member-lease-s", f"{LEASE_S:g}")
        lives = {at: await enter(broker(tmp_path, trees[OLD], at, *fleet)) for at in addresses}
        await until(lambda: brokers_at(addresses[0]).get("brokers") == "2", WITHIN_S)
        made = await enter(engines(tmp_path, ",".join(addresses), trees))
        serving = await asyncio.gather(*(made.start(side, OLD) for side in "pdpd"))
        async with traffic(serving) as flow:

            async def go_on(*pairs: tuple[str, str]) -> None:
                """Wait until each pair of releases has handed over anew, or one has failed."""
                before = flow.done.copy()
                await until(
                    lambda: (
                        bool(flow.failed)
                        or all(flow.done[one] >= before[one] + EACH for one in pairs)
                    ),
                    WITHIN_S,
                )

            await go_on((OLD, OLD))
            first = brokers_at(addresses[0])
            assert release_of(first["version"]).startswith(OLD)
            # A standby first, so that the leader's place is taken by one of the new release.
            for at in sorted(addresses, key=lambda one: one == first["leader"]):
                await asyncio.to_thread(lives[at].end, signal.SIGTERM)
                await go_on((OLD, OLD))
                await enter(broker(tmp_path, trees[NEW], at, *fleet))
                await until(lambda at=at: brokers_at(at).get("brokers") == "2", WITHIN_S)  # type: ignore[misc]
                await go_on((OLD, OLD))
            assert release_of(brokers_at(addresses[0])["version"]) == NEW
            assert brokers_at(addresses[0])["leader"] != first["leader"]
            for old in list(serving):
                serving.append(await made.start(old.side, NEW))
                serving.remove(old)
                await old.drain()
                p_side, d_side = ({e.release for e in serving if e.side == s} for s in "pd")
                await go_on(*product(p_side, d_side))
            await go_on((NEW, NEW))
        assert flow.failed == []
        assert set(flow.done) == {*product((OLD, NEW), (OLD, NEW))}


async def test_an_agent_that_reads_another_form_of_programs_is_told_so(
    trees: dict[str, Path], tmp_path: Path
) -> None:
    old = installed(source(found(OF_FORM_2), tmp_path / "source"), tmp_path / "form 2")
    address = f"127.0.0.1:{free_port()}"
    async with (
        broker(tmp_path, trees[NEW], address),
        engines(tmp_path, address, {"before": old}) as made,
    ):
        said = (await made.begin("d", "before")).ready.result()
    assert said.startswith("refused AGENT_RELEASE_DIFFERS"), said
    assert "reads programs of form 2" in said
    assert "run one version of Restow" in said
