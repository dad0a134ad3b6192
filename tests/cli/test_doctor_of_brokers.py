"""`restow doctor` on several brokers: each is asked at the address that it gives engines."""

from __future__ import annotations

import asyncio

import pytest

from broker.fakes import broker
from cli.broker_process import run_restow
from restow.broker.client import AdminClient
from restow.broker.doctor.fleet_view import judge_fleet, judge_membership, look_at_brokers
from restow.broker.doctor.local import Finding, Verdict
from restow.broker.registry.leadership import Leadership
from restow.broker.registry.registry import Fleet, Leader, Timing
from restow.broker.server.base.standing import FleetReport, Standing
from restow.v1 import admin_pb2 as pb


class Among(Standing):
    """One of two brokers, as it tells of them."""

    def __init__(self, address: str, other: str) -> None:
        known = Leadership(address, Timing())
        known.kept(0.0, 2.0)
        known.saw(Fleet(Leader(other, 3), frozenset({address, other}), 3))
        self._report = FleetReport(known, "f", 0.1, 0, 0.0, None)

    def report(self) -> FleetReport:
        return self._report


async def test_an_address_where_nobody_or_another_broker_answers_is_bad() -> None:
    async with broker() as running, broker() as stranger:
        running.hub.standing = Among(running.address, stranger.address)

        def look() -> dict[str, Finding]:
            with AdminClient(running.address) as client:
                return {one.subject: one for one in look_at_brokers(client, AdminClient)}

        found = await asyncio.to_thread(look)
        assert found[f"broker {running.address}"].verdict is Verdict.OK
        assert "a broker that runs alone" in found[f"broker {stranger.address}"].words
        running.hub.standing = Among(running.address, "127.0.0.1:1")
        found = await asyncio.to_thread(look)
        assert "cannot be reached from here" in found["broker 127.0.0.1:1"].words


async def test_of_the_only_broker_nothing_more_is_said() -> None:
    async with broker() as running:

        def look() -> list[Finding]:
            with AdminClient(running.address) as client:
                return list(look_at_brokers(client, AdminClient))

        assert not await asyncio.to_thread(look)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (pb.Membership(address="a:1", fleet="f"), "etcd has not let it in (it is away)"),
        (
            pb.Membership(address="a:1", fleet="f", let_in=True, still_s=3.0),
            "it has stood still for 3.0 s",
        ),
        (pb.Membership(address="b:1", fleet="f", let_in=True), "another broker answers there: b"),
        (pb.Membership(address="a:1", fleet="g", let_in=True), "another broker answers there: a"),
    ],
)
def test_what_is_wrong_with_a_broker_is_told(found: pb.Membership, words: str) -> None:
    found.trouble = "it is away"
    judged = judge_membership(found, "a:1", "f")
    assert judged.verdict is Verdict.BAD
    assert judged.words.startswith(words)


@pytest.mark.parametrize(
    ("how", "verdict", "words"),
    [
        ({"leader": "a:1", "epoch": 4}, Verdict.OK, "a:1 leads in epoch 4, of 2 brokers"),
        ({"leaderless_s": 8.0}, Verdict.BAD, "no broker has led for 8.0 s"),
        ({"leader": "a:1", "expected": 3}, Verdict.WARN, "2 of 3 brokers are there"),
        ({"leader": "a:1", "warnings": ["e:1: NOSPACE"]}, Verdict.WARN, "etcd says: e:1: NOSPACE"),
    ],
)
def test_a_fleet_without_a_leader_or_enough_standbys_is_told(
    how: dict[str, object], verdict: Verdict, words: str
) -> None:
    judged = judge_fleet(pb.Membership(address="a:1", fleet="f", brokers=2, **how))  # type: ignore[arg-type]
    assert (judged.verdict, judged.words) == (verdict, words)


def test_settings_of_etcd_that_do_not_go_together_are_refused_first() -> None:
    done = run_restow("doctor", "--here", "--etcd", "127.0.0.1:1", "--etcd-user", "restow")
    assert done.returncode == 1
    assert done.stderr.startswith("error: ETCD_SETTINGS_INVALID: ")
    assert not done.stdout
