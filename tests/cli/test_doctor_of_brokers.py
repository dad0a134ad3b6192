"""`restow doctor` on several brokers: each is asked where it tells engines to come."""

from __future__ import annotations

import asyncio

import pytest
from restow.broker.server.fleet.report import FleetReport, LeaseReport
from restow.broker.server.fleet.standing import Alone

from broker.fakes import broker
from cli.broker_process import run_restow
from restow.broker.client import AdminClient
from restow.broker.doctor.fleet_view import judge_membership, look_at_brokers
from restow.broker.doctor.local import Finding, Verdict
from restow.v1 import admin_pb2 as pb


class Among(Alone):
    """One of two brokers, as it tells of them."""

    def __init__(self, address: str, other: str) -> None:
        self._report = FleetReport(
            address, "f", {address: 1.0, other: None}, {}, LeaseReport(2.0, 0.1, None), None
        )

    def report(self) -> FleetReport:  # type: ignore[override]
        return self._report


async def test_an_address_where_nobody_or_another_broker_answers_is_bad() -> None:
    async with broker() as running, broker() as stranger:
        running.hub.standing = Among(running.address, stranger.address)

        def look() -> dict[str, Finding]:
            with AdminClient(running.address) as client:
                return {one.subject: one for one in look_at_brokers(client, AdminClient)}

        found = await asyncio.to_thread(look)
        assert found[f"broker {running.address}"].verdict is Verdict.OK
        assert "one that is alone" in found[f"broker {stranger.address}"].words
        running.hub.standing = Among(running.address, "127.0.0.1:1")
        found = await asyncio.to_thread(look)
        assert "can't be reached from here" in found["broker 127.0.0.1:1"].words


async def test_of_a_broker_that_is_alone_nothing_more_is_said() -> None:
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
            "it stands still since 3.0 s",
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


def test_settings_of_etcd_that_do_not_go_together_are_refused_first() -> None:
    done = run_restow("doctor", "--here", "--etcd", "127.0.0.1:1", "--etcd-user", "restow")
    assert done.returncode == 1
    assert done.stderr.startswith("error: ETCD_SETTINGS_INVALID: ")
    assert not done.stdout
