"""What `restow brokers` shows of the only broker, of a leader and of a standby."""

from __future__ import annotations

import asyncio

import pytest

from broker.fakes import broker
from cli.broker_process import run_restow
from restow.broker.cli.views.fleet_views import brokers_json, show_brokers, standing_text
from restow.v1 import admin_pb2 as pb


async def test_the_only_broker_says_so() -> None:
    async with broker() as running:
        text = (await asyncio.to_thread(run_restow, "brokers", "--broker", running.address)).stdout
    assert text.startswith("This is the only broker.")


def told(**how: object) -> pb.ListBrokersResponse:
    """Return what a broker tells of itself."""
    known = {"address": "h:1", "fleet": "f", "brokers": 2, "let_in": True, "leader": "h:2"}
    return pb.ListBrokersResponse(membership=pb.Membership(**known | {"epoch": 7} | how))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({}, "stands by, h:2 leads in epoch 7; there are 2 brokers"),
        ({"leads": True, "leader": "h:1"}, "leads in epoch 7; there are 2 brokers"),
        ({"expected": 3}, "stands by, h:2 leads in epoch 7; there are 2 of 3 brokers"),
        (
            {"warnings": ["e: NOSPACE"], "brokers": 1},
            "stands by, h:2 leads in epoch 7; there are 1",
        ),
        ({"still_s": 12.0}, "has stood still for 12.0 s: its lease may have ended"),
        ({"leader": "", "leaderless_s": 3.0}, "knows no leader since 3.0"),
        ({"let_in": False}, "is not let in by the brokers' registry"),
    ],
)
def test_a_broker_says_how_it_stands_and_why_the_registry_does_not_answer(
    how: dict[str, object], words: str
) -> None:
    assert standing_text(brokers_json(told(**how))["membership"]).plain.startswith(words)
    why = {"trouble_reason": "ETCD_UNREACHABLE", "trouble": "etcd is away"}
    text = standing_text(brokers_json(told(**how, **why))["membership"]).plain
    assert text.endswith("(ETCD_UNREACHABLE: etcd is away)")


def test_all_brokers_are_shown_with_what_each_does(capsys: pytest.CaptureFixture[str]) -> None:
    answer = told()
    answer.brokers.add(address="h:1", asked=True)
    answer.brokers.add(address="h:2", leads=True)
    show_brokers(brokers_json(answer))
    lines = [" ".join(one.split()) for one in capsys.readouterr().out.splitlines()]
    assert {"h:1 standby asked", "h:2 leads"} <= set(lines)
