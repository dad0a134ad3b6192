"""The broker's log tells its day: how it began, who came and went, and which handoffs failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from broker.content.holders import D_STATE, STATE
from broker.fakes import D_BLOCKS, P_BLOCKS, POSITION, broker, engine, model_layout, pair
from restow.broker.client import BrokerCallError
from restow.broker.server.serve import RunningBroker

Logged = Callable[[str], list[dict[str, Any]]]


def sides(lines: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Return the tenant, the engine and the rank, if any, of each line."""
    return [
        (one["tenant"], one["engine"], *([one["rank"]] if "rank" in one else [])) for one in lines
    ]


async def test_a_day(logged: Logged) -> None:
    async with broker(lease_s=20.0, tenant_max_live=77) as running:
        (began,) = logged("broker started")
        assert began["listening"] == running.address
        assert (began["tls"], began["callers_known_by"]) == (False, "nothing")
        assert (began["lease_s"], began["tenant_max_live"], began["max_live"]) == (20, 77, 100_000)
        assert began["version"]
        async with pair(running.address, 2, 1) as both:
            await both.hand_over("good")
            with pytest.raises(BrokerCallError):
                await both.d.request("good", {"attention": [1]})
            assert not logged("handoff failed")
            both.p.publish("h", P_BLOCKS, POSITION)
            assert not (await both.d.request("h", D_BLOCKS, timeout_ms=60)).done
            (failed,) = logged("handoff failed")
            assert failed["handoff"] == "h"
            assert failed["reason"] == "NOT_PUBLISHED"
            assert (failed["source"], failed["destination"]) == ("p", "d")
            cancelled = both.d.request("unwanted", D_BLOCKS)
            both.d.cancel("unwanted")
            assert (await cancelled).reason == "CANCELLED"
            sought = both.d.request("sought", D_STATE, prefix=STATE)  # nobody holds it
            assert (await sought).reason == "NOT_HELD"
            assert len(logged("handoff failed")) == 1
        assert sides(logged("engine registered")) == [("default", "p"), ("default", "d")]
        assert sides(logged("session opened")) == sides(logged("engine registered"))
        ranks = [("default", "p", 0), ("default", "p", 1), ("default", "d", 0)]
        assert sides(logged("agent connected")) == ranks
        assert sorted(sides(logged("agent disconnected")) + sides(logged("agent gone"))) == sorted(
            ranks
        )
        assert sorted(sides(logged("engine gone"))) == [("default", "d"), ("default", "p")]
        assert {one["why"] for one in logged("engine gone")} == {
            "engine p unregistered",
            "engine d unregistered",
        }
    assert len(logged("broker ends")) == 1


async def test_an_engine_that_is_replaced_leaves_two_lines(
    running: RunningBroker, logged: Logged
) -> None:
    async with (
        engine(running.address, "twin", layout=model_layout(1), agents=False) as (old, _),
        engine(running.address, "twin", layout=model_layout(1), agents=False) as (new, _),
    ):
        assert [one["incarnation"] for one in logged("engine registered")] == [
            old.ref.incarnation,
            new.ref.incarnation,
        ]
        (gone,) = logged("engine gone")
        assert new.ref.incarnation in gone["why"]
