"""What operators see of a demand by prefix: who was offered it, who declined, how it ended."""

from __future__ import annotations

import asyncio
import json

from agent_harness.waiting import until
from broker.content.holders import D_STATE, PROMPT, STATE, ask, holder
from broker.fakes import broker, engine
from broker.operating.test_operators_deliveries import shown
from broker.pages import key, metrics
from restow.broker.client import AsyncAdminClient
from restow.broker.server.serve import RunningBroker


async def test_offers_are_shown_until_the_end_and_after_it() -> None:
    async with (
        broker(http_listen="127.0.0.1:0") as running,
        holder(running, "a") as a,
        holder(running, "b") as b,
        engine(running.address, "d") as (d, _),
        AsyncAdminClient(running.address) as client,
    ):
        a.answer, b.answer = a.decline, b.be_silent
        asked = asyncio.ensure_future(ask(d, "one"))
        await until(lambda: len(b.offers) == 1)
        open_one = (await client.handoff("one")).handoff
        assert (open_one.prefix_tokens, open_one.offers, open_one.offers_declined) == (64, 2, 1)
        assert open_one.waits_for == "engine b has not answered the offer"
        b.publish(b.offers[0])
        assert (await asked).state == "DONE"
        assert (await ask(d, "two", PROMPT.prefix(48))).reason == "NOT_HELD"
        b.answer = b.decline
        assert (await ask(d, "three")).reason == "NOT_HELD"

        story = (await client.handoff("one")).timeline
        said = [
            (one.event, one.detail) for one in story if "off" in one.event or "look" in one.event
        ]
        assert said == [
            ("looked up", "engines that hold its 64 tokens: 2"),
            ("offered", "a"),
            ("offer declined", "a: evicted"),
            ("offered", "b"),
        ]
        lines = {name: await shown(running, "handoff", name) for name in ("one", "two", "three")}
        assert "asked for by prefix: 64 tokens, offered to 2, 1 declined\n" in lines["one"]
        assert "asked for by prefix: 48 tokens, nobody holds it\n" in lines["two"]
        assert "asked for by prefix: 64 tokens, offered to 2, 2 declined\n" in lines["three"]
        assert "NOT_HELD: all engines that announced this state declined it (2)" in lines["three"]
        listed = json.loads(await shown(running, "handoffs", "--json"))["handoffs"]
        assert [
            (one["prefix_tokens"], one["offers"], one["offers_declined"]) for one in listed
        ] == [
            (64, 2, 2),
            (48, 0, 0),
            (64, 2, 1),
        ]

        holdings = await shown(running, "holdings")
        assert "a: asked for what it holds 2 times, declined 2\n" in holdings
        assert "b: asked for what it holds 2 times, declined 1\n" in holdings
        told = json.loads(await shown(running, "holdings", "--json"))["engines"]
        assert [(one["offers"], one["offers_declined"]) for one in told] == [(2, 2), (2, 1)]

        found = await metrics(running)
        counts = {
            name: found[key(f"{name}_total")]
            for name in ("prefix_demands", "prefix_demands_not_held", "offers", "offers_declined")
        }
        assert list(counts.values()) == [3, 2, 4, 3]
        ended = key("handoffs_ended_total", state="CANCELLED", reason="NOT_HELD")
        assert found[ended] == counts["prefix_demands_not_held"]


async def test_a_demand_on_offer_ends_when_its_patience_does() -> None:
    async with (
        broker(offer_s=60.0) as running,
        holder(running, "p") as p,
        engine(running.address, "d") as (d, _),
    ):
        p.answer = p.be_silent
        asked = d.request("one", D_STATE, prefix=STATE, timeout_ms=100)
        ended = await asyncio.wait_for(asked, 20)
        assert (ended.state, ended.reason) == ("EXPIRED", "NOT_PUBLISHED")
        assert "engine p has not answered the offer" in ended.detail


async def test_a_demand_that_names_no_prefix_was_offered_to_nobody(running: RunningBroker) -> None:
    async with engine(running.address, "d") as (d, _), AsyncAdminClient(running.address) as client:
        d.request("plain", {"attention": [1], "state": [2]})
        await until(lambda: bool(running.hub.directory.ledger.by_number))
        info = (await client.handoff("plain")).handoff
        assert (info.prefix_tokens, info.offers, info.waits_for) == (0, 0, "nobody published it")
        value = json.loads(await shown(running, "handoff", "plain", "--json"))
        assert (value["prefix_tokens"], value["offers"], value["offers_declined"]) == (None,) * 3
