"""What `restow events --follow` tells when the leader dies and another one follows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fleet.scene import pair
from fleet_harness.brokers import Fleet
from restow.broker.cli.common.news import Event, News
from restow.broker.client import AdminClient
from restow.broker.errors import RestowError

WITHIN_S = 40.0


def ends(events: list[Event]) -> list[str]:
    return [one["handoff_id"] for one in events if one["event"] == "handoff"]


async def test_each_end_is_told_once_whoever_leads(fleet: Fleet) -> None:
    async with pair(fleet.addresses, "ends") as both:
        with AdminClient(fleet.addresses) as client:
            news = News(client, since_s=0.0)
            told = await asyncio.to_thread(news.look)
            assert told == []

            async def until(so: Callable[[Event], bool]) -> None:
                """Look for news until an event is told that satisfies ``so``."""
                async with asyncio.timeout(WITHIN_S):
                    while not any(map(so, told)):
                        try:
                            told.extend(await asyncio.to_thread(news.look))
                        except RestowError:  # nobody leads
                            await asyncio.sleep(0.1)

            first = await both.hand_over()
            await until(lambda one: one["event"] == "handoff")
            leader = both.leader(fleet)
            leader.kill()
            second = await both.hand_over()
            await until(lambda one: one.get("handoff_id") == second.handoff_id)
            for _ in range(3):
                told.extend(await asyncio.to_thread(news.look))
        await leader.start()
    assert ends(told) == [first.handoff_id, second.handoff_id]
