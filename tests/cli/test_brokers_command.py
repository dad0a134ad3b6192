"""What `restow brokers` shows of a broker that is alone, and of several."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from restow.broker.server.fleet.report import FleetReport, LeaseReport, PoolReport

from broker.fakes import broker, pair
from cli.broker_process import run_restow
from restow.broker.cli.views.fleet_views import brokers_json, show_brokers, standing_text
from restow.broker.client import AdminClient
from restow.broker.errors import OwnerUnknownError
from restow.broker.layout.values import ModelIdentity, Pool
from restow.broker.server.services.fleet_messages import membership_of
from restow.v1 import admin_pb2 as pb


async def test_a_broker_that_is_alone_says_so_and_shows_what_its_pools_carry() -> None:
    async with broker() as running, pair(running.address, 2, 1) as both:
        await both.hand_over("one")

        def look() -> tuple[Any, str]:
            with AdminClient(running.address) as client:
                value = brokers_json(client.brokers())
            return value, run_restow("brokers", "--broker", running.address).stdout

        value, text = await asyncio.to_thread(look)
    assert value["membership"] is None
    assert value["brokers"] == []
    (pool,) = value["pools"]
    assert (pool["tenant"], pool["owner"], pool["epoch"], pool["own"]) == (
        "default",
        None,
        None,
        True,
    )
    assert (pool["engines"], pool["agents"], pool["handoffs_live"]) == (2, 3, 0)
    assert text.startswith("This broker is alone: it has all pools.")
    assert "owner" not in text


POOL, OTHER = Pool("default", ModelIdentity("m", "v1")), Pool("a", ModelIdentity("n"))


def told(report: FleetReport) -> dict[str, Any]:
    """As a client has it of a broker with that report."""
    answer = pb.ListBrokersResponse(membership=membership_of(report))
    return brokers_json(answer)


def standing(lease: LeaseReport | None, trouble: OwnerUnknownError | None = None) -> str:
    pools = {POOL: PoolReport("h:1", 7, 3.0, True), OTHER: PoolReport("h:2", 9, None)}
    report = FleetReport("h:1", "f", {"h:1": 5.0, "h:2": None}, pools, lease, trouble)
    return standing_text(told(report)["membership"]).plain


@pytest.mark.parametrize(
    ("lease", "words"),
    [
        (LeaseReport(2.0, 0.25, None), "is one of 2 and owns 1 pools; its lease of 2 s was kept"),
        (LeaseReport(2.0, 13.5, 12.0), "has stood still for 12.0 s: its lease may have ended"),
        (None, "is not let in by the brokers' registry: it owns nothing"),
    ],
)
def test_a_broker_says_how_its_lease_is_and_why_the_registry_does_not_answer(
    lease: LeaseReport | None, words: str
) -> None:
    assert standing(lease).startswith(words)
    trouble = OwnerUnknownError("etcd is away")
    assert standing(lease, trouble).endswith("(OWNER_UNKNOWN: etcd is away)")


def test_pools_have_their_owners_and_those_of_others_show_no_counts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    answer = pb.ListBrokersResponse()
    report = FleetReport("h:1", "f", {"h:1": 5.0, "h:2": None}, {}, LeaseReport(2, 0, None), None)
    answer.membership.CopyFrom(membership_of(report))
    answer.brokers.add(address="h:1", asked=True, age_s=5.0)
    answer.brokers.add(address="h:2")
    answer.pools.add(tenant="a", model="m", owner="h:1", epoch=7, age_s=3.0, own=True, engines=2)
    answer.pools.add(tenant="a", model="n", owner="h:2", epoch=9)
    answer.pools.add(tenant="b", model="o", engines=1)
    show_brokers(brokers_json(answer))
    lines = capsys.readouterr().out.splitlines()
    found: Callable[[str], str] = lambda start: next(  # noqa: E731
        " ".join(one.split()) for one in lines if one.startswith(start)
    )
    assert found("h:1  ") == "h:1 5.0 s ago was asked"
    assert found("h:2  ") == "h:2 before it came"
    assert found("a       m") == "a m h:1 7 3.0 s ago 2 0 0"
    assert found("a       n") == "a n h:2 9 before it came - - -"
    assert found("b       o") == "b o nobody - - 1 0 0"
