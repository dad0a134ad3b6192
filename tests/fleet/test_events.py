"""What `restow events --follow` tells of several brokers, one of which dies and comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from etcd_harness.cluster import EtcdCluster
from fleet.scene import pair
from fleet_harness.brokers import running_fleet
from restow.broker.cli.news import Event, News
from restow.broker.cli.views.tables import event_line
from restow.broker.client import AdminClient

WITHIN_S = 40.0


def ends(events: list[Event]) -> list[tuple[str, str]]:
    return [(one["handoff_id"], one["broker"]) for one in events if one["event"] == "handoff"]


async def test_an_owner_that_dies_is_silent_and_its_engines_move_and_each_end_is_told_once(
    etcd: EtcdCluster, tmp_path: Path
) -> None:
    async with running_fleet(tmp_path, etcd, 2) as fleet, pair(fleet.addresses) as both:
        with AdminClient(fleet.addresses) as client:
            news = News(client, since_s=0.0)
            told = await asyncio.to_thread(news.look)
            assert told == []

            async def until(so: Callable[[Event], bool]) -> None:
                """Look until something is told."""
                async with asyncio.timeout(WITHIN_S):
                    while not any(map(so, told)):
                        told.extend(await asyncio.to_thread(news.look))

            first = await both.hand_over()
            owner = both.owner(fleet)
            await until(lambda one: one["event"] == "handoff")
            owner.kill()
            await until(lambda one: one.get("what") == "silent")
            second = await both.hand_over()
            other = both.owner(fleet)
            for name in ("p-m", "d-m"):
                await until(lambda one: one.get("engine_id") == name and one["what"] == "moved")  # noqa: B023 - at once
            await until(lambda one: one.get("handoff_id") == second.handoff_id)
            moves = {one["what"] for one in told if one["event"] == "engine"}
            assert moves <= {"moved", "changed"}
            await owner.start()
            await until(lambda one: one.get("what") == "answers")
            for _ in range(3):
                told.extend(await asyncio.to_thread(news.look))
    assert ends(told) == [
        (first.handoff_id, owner.address),
        (second.handoff_id, other.address),
    ]
    heard = [(one["what"], one["broker"]) for one in told if one["event"] == "broker"]
    assert heard == [("silent", owner.address), ("answers", owner.address)]
    lines = [event_line(one) for one in told]
    assert any(f"  BROKER     {owner.address}  does not answer: " in one for one in lines)
    assert any(one.endswith(f"  BROKER     {owner.address}  answers again") for one in lines)
    assert any(f"  ENGINE     p-m  engine moved to {other.address}, " in one for one in lines)


async def test_what_ends_at_a_broker_that_is_silent_is_told_when_it_answers_again(
    etcd: EtcdCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("restow.broker.cli.news.MARGIN_S", 0.5)
    async with running_fleet(tmp_path, etcd, 2) as fleet, pair(fleet.addresses) as both:
        await both.hand_over()
        owner = both.owner(fleet)
        with AdminClient(fleet.addresses, timeout_s=0.5) as client:
            news = News(client, since_s=0.0)
            await asyncio.to_thread(news.look)
            done = [await both.hand_over() for _ in range(3)]
            owner.stop()
            try:
                told = await asyncio.to_thread(news.look)
                for _ in range(2):  # longer than looks overlap
                    told += await asyncio.to_thread(news.look)
            finally:
                owner.go_on()
            assert [one["what"] for one in told if one["event"] == "broker"] == ["silent"]
            assert not ends(told)
            async with asyncio.timeout(WITHIN_S):
                while not any(one.get("what") == "answers" for one in told):
                    told.extend(await asyncio.to_thread(news.look))
    assert ends(told) == [(one.handoff_id, owner.address) for one in done]
