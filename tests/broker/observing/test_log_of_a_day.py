"""The broker's log tells its day: how it began, who came and went, and which handoffs failed."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from broker.content.test_offers import D_STATE, STATE
from broker.fakes import D_BLOCKS, P_BLOCKS, POSITION, broker, engine, model_layout, pair
from restow.broker.client import BrokerCallError
from restow.broker.logs import TOLD


@pytest.fixture
def day(caplog: pytest.LogCaptureFixture) -> Day:
    caplog.set_level(logging.INFO, logger="restow")
    return Day(caplog)


class Day:
    """What the broker logged."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    def __getitem__(self, event: str) -> list[dict[str, Any]]:
        """Return the values of all log lines of an event."""
        records = [one for one in self._caplog.records if one.name == "restow.broker"]
        return [values for name, values in (vars(one)[TOLD] for one in records) if name == event]

    def sides(self, event: str) -> list[tuple[Any, ...]]:
        """Return the tenant, the engine and the rank, if any, of each line of an event."""
        return [
            (one["tenant"], one["engine"], *([one["rank"]] if "rank" in one else []))
            for one in self[event]
        ]


async def test_a_day(day: Day) -> None:
    async with broker(lease_s=20.0, tenant_max_live=77) as running:
        (began,) = day["broker started"]
        assert began["listening"] == running.address
        assert (began["tls"], began["callers_known_by"]) == (False, "nothing")
        assert (began["lease_s"], began["tenant_max_live"], began["max_live"]) == (20, 77, 100_000)
        assert began["version"]
        async with pair(running.address, 2, 1) as both:
            await both.hand_over("good")
            with pytest.raises(BrokerCallError):
                await both.d.request("good", {"attention": [1]})
            assert not day["handoff failed"]
            both.p.publish("h", P_BLOCKS, POSITION)
            assert not (await both.d.request("h", D_BLOCKS, timeout_ms=60)).done
            (failed,) = day["handoff failed"]
            assert failed["handoff"] == "h"
            assert failed["reason"] == "NOT_PUBLISHED"
            assert (failed["source"], failed["destination"]) == ("p", "d")
            cancelled = both.d.request("unwanted", D_BLOCKS)
            both.d.cancel("unwanted")
            assert (await cancelled).reason == "CANCELLED"
            sought = both.d.request("sought", D_STATE, prefix=STATE)  # nobody holds it
            assert (await sought).reason == "NOT_HELD"
            assert len(day["handoff failed"]) == 1
        assert day.sides("engine registered") == [("default", "p"), ("default", "d")]
        assert day.sides("session opened") == day.sides("engine registered")
        ranks = [("default", "p", 0), ("default", "p", 1), ("default", "d", 0)]
        assert day.sides("agent connected") == ranks
        assert sorted(day.sides("agent disconnected") + day.sides("agent gone")) == sorted(ranks)
        assert sorted(day.sides("engine gone")) == [("default", "d"), ("default", "p")]
        assert {one["why"] for one in day["engine gone"]} == {
            "engine p unregistered",
            "engine d unregistered",
        }
    assert len(day["broker ends"]) == 1


async def test_an_engine_that_is_replaced_leaves_two_lines(day: Day) -> None:
    async with (
        broker() as running,
        engine(running.address, "twin", layout=model_layout(1), agents=False) as (old, _),
        engine(running.address, "twin", layout=model_layout(1), agents=False) as (new, _),
    ):
        assert [one["incarnation"] for one in day["engine registered"]] == [
            old.ref.incarnation,
            new.ref.incarnation,
        ]
        (gone,) = day["engine gone"]
        assert new.ref.incarnation in gone["why"]
