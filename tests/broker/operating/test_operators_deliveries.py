"""What operators see of a publication for several readers, and of each of its deliveries."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from typer.testing import CliRunner

from agent_harness.waiting import until
from broker.collector import attributes, collector
from broker.fakes import D_BLOCKS, P_BLOCKS, POSITION, broker, engine, silent
from broker.pages import fetch
from restow.broker.cli.main import app
from restow.broker.client import AsyncAdminClient
from restow.broker.server.observe.status import StatusPage
from restow.broker.server.serve import RunningBroker
from restow.v1 import broker_pb2 as pb


async def shown(running: RunningBroker, *arguments: str) -> str:
    where = ("--broker", running.address)
    runner = CliRunner(env={"COLUMNS": "200"})
    return (await asyncio.to_thread(runner.invoke, app, [*arguments, *where])).output


def drawn(running: RunningBroker, table: str) -> list[dict[str, str]]:
    """Return the rows of a table of the status page, by title."""
    seen = StatusPage(running.hub).look({})
    assert seen is not None
    titles, rows = seen[table]["titles"], seen[table]["rows"]
    assert len({one["key"] for one in rows}) == len(rows)
    return [dict(zip(titles, one["texts"], strict=True)) for one in rows]


async def test_a_publication_and_its_deliveries_are_shown() -> None:
    async with (
        collector() as kept,
        broker(
            http_listen="127.0.0.1:0", status_page=True, otlp_endpoint=kept.address, trace_ratio=1.0
        ) as running,
        engine(running.address, "p", 2) as p,
        engine(running.address, "d") as d,
        engine(running.address, "e", 2) as e,
        engine(running.address, "f") as f,
        AsyncAdminClient(running.address) as client,
    ):
        for agent in e[1]:
            agent.answers = silent
        released = p[0].publish("h", P_BLOCKS, POSITION, readers=2)
        for agent in p[1]:
            await agent.fence("h")
        assert (await d[0].request("h", D_BLOCKS)).done
        asked = e[0].request("h", D_BLOCKS)
        await e[1][0].order("execute")
        waiting = f[0].request("h", D_BLOCKS)
        ledger = running.hub.directory.ledger
        await until(lambda: len(ledger.by_number) == 3)

        status = await client.status()
        assert status.handoffs_live == 3
        listed = (await client.handoffs()).handoffs
        whole, *deliveries = listed
        assert (whole.readers, whole.delivered, whole.destination_engine) == (2, 1, "")
        assert whole.waits_for == "1 of 2 readers have it, read by e"
        assert [one.destination_engine for one in deliveries] == ["d", "e", "f"]
        assert [pb.HandoffState.Name(one.state) for one in deliveries] == [
            "HANDOFF_STATE_DONE",
            "HANDOFF_STATE_READING",
            "HANDOFF_STATE_READY",
        ]
        assert deliveries[2].waits_for.startswith("every reader's place is taken")
        ended = (await client.handoffs(ended_within_s=60.0)).handoffs
        assert [one.destination_engine for one in ended] == ["d"]

        table = await shown(running, "handoffs")
        assert "1 of 2 readers" in table
        story = await shown(running, "handoff", "h")
        assert story.count("h  ") >= 4, story
        assert "delivered" in story
        assert "asked for" in story
        found: dict[str, Any] = json.loads(await shown(running, "handoff", "h", "-o", "json"))
        assert [one["destination_engine"] for one in found["deliveries"]] == ["d", "e", "f"]
        assert "h" in await shown(running, "leases")

        assert [one["to"] for one in drawn(running, "under_way")] == ["1 of 2 readers", "e", "f"]
        one = (await fetch(running, "/handoff.json?id=h")).json
        assert {"asked for", "delivered"} <= {event for _, event, _ in one["timeline"]}
        assert len(one["deliveries"]) == 3

        waiting.cancel()
        asked.cancel()
        for agent in e[1]:
            await agent.drop()
        p[0].cancel("h")
        assert (await released).delivered == 1
        metrics = (await fetch(running, "/metrics")).body
        assert (
            'restow_publications_ended_total{reason="CANCELLED",state="CANCELLED"} 1.0' in metrics
        )
        assert 'restow_handoffs_ended_total{reason="",state="DONE"} 1.0' in metrics
        lines = await shown(running, "events")
        assert "from p to 1 of 2 readers" in lines
        assert "from p to d" in lines
        assert [one["to"] for one in drawn(running, "ended")] == ["1 of 2 readers", "d", "e", "f"]
    [publication] = kept.named("publication")
    assert attributes(publication)["restow.readers"] == 2
    assert attributes(publication)["restow.delivered"] == 1
    assert len(kept.named("delivery")) == 3
    assert not kept.named("handoff")
