"""What `restow events --follow` tells of engines: they come, get agents, are replaced and go."""

from __future__ import annotations

import asyncio

from broker.fakes import broker, engine, model_layout
from restow.broker.cli.common.news import Event, News
from restow.broker.cli.views.tables import event_line
from restow.broker.client import AdminClient


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
