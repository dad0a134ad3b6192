"""What operators see of brokers, of engines that come and go, and of a read under way."""

from __future__ import annotations

import asyncio

import pytest

from broker.fakes import POSITION, answer_at_once, broker, engine, model_layout
from cli.typed import printed_aside
from restow.broker.cli.common.news import Event, News
from restow.broker.cli.views.tables import event_line, handoff_lines, show_brokers, standing_text
from restow.broker.client import AdminClient
from restow.broker.client.admin import AsyncAdminClient
from restow.broker.display.documents import brokers_json, handoff_json, handoffs_json
from restow.broker.display.rows import progress_text
from restow.broker.families import AttentionSpec, EngineSettings, ModelSpec, build_layout
from restow.broker.layout import DType
from restow.v1 import admin_pb2 as pb
from restow.v1 import agent_link_pb2 as link


async def test_the_only_broker_says_so() -> None:
    async with broker() as running:
        text = await printed_aside("brokers", "--broker", running.address)
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


async def test_engines_come_and_go() -> None:
    async with broker() as running:
        with AdminClient(running.address) as client:
            news = News(client, since_s=0.0)

            async def told(until: str) -> list[Event]:
                """Return what is new, until an engine has become ``until``.

                The test itself calls `look`.
                """
                found: list[Event] = []
                async with asyncio.timeout(30):
                    while not any(one["what"] == until for one in found):
                        found += await asyncio.to_thread(news.look)
                return found

            assert await asyncio.to_thread(news.look) == []
            async with engine(running.address, "p", layout=model_layout(1)) as (older, agents):
                found = await told("registered")
                assert found[0]["engine_id"] == "p"
                while (news_of := found[-1])["agents"] < 1:
                    found += await told("changed")
                assert (news_of["ranks"], news_of["session"]) == (1, True)
                await agents[0].drop()
                (lost,) = await told("changed")
                assert lost["agents"] == 0
                assert event_line(lost, tenants=True).endswith(
                    f"ENGINE     default/p  engine changed, 0 of 1 agents, session open, life "
                    f"{older.ref.incarnation}"
                )
                async with engine(running.address, "p", layout=model_layout(1), agents=False):
                    assert (await told("replaced"))[0]["incarnation"] != older.ref.incarnation
            assert (await told("gone"))[-1]["engine_id"] == "p"
            assert await asyncio.to_thread(news.look) == []


async def test_a_read_of_no_bytes_has_progress_too() -> None:
    # D holds all of the prompt, and the model keeps nothing else.
    model = ModelSpec("m", (AttentionSpec(0, 2, 16, DType.BFLOAT16),))
    layout = build_layout(model, EngineSettings(tp=2, page_tokens=16))
    async with (
        broker() as running,
        engine(running.address, "p", layout=layout) as (p, p_agents),
        engine(running.address, "d", layout=layout) as (d, d_agents),
    ):
        for agent in d_agents:
            agent.answers = no_settled
        p.publish("held", {"attention": [1, 2, 3]}, POSITION)
        for agent in p_agents:
            await agent.fence("held")
        d.request("held", {"attention": [4, 5, 6]}, held_tokens=POSITION)
        await d_agents[0].order("execute")
        async with AsyncAdminClient(running.address) as client:
            (one,) = handoffs_json(await client.handoffs())["handoffs"]
            whole = handoff_json(await client.handoff("held"))
        assert one["state"] == "READING"
        assert progress_text(one) == "0 B of 0 B, 0 of 2 ranks"
        assert handoff_lines(whole, 80)


def no_settled(order: link.AgentOrder) -> list[link.AgentMessage]:
    """Answer as an agent that is still at work on every read."""
    return [] if order.WhichOneof("body") == "execute" else answer_at_once(order)
