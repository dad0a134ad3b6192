"""Engines hand over to each other only if they serve the same model, weights and all."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import pytest

from agent_harness.waiting import WAIT_S, until
from broker.content.holders import STATE
from broker.fakes import (
    D_BLOCKS,
    P_BLOCKS,
    PAGES,
    POSITION,
    FakeAgent,
    broker,
    model_layout,
    pair,
)
from restow.broker.client import AdminClient, EngineSession, HandoffEnded, Offer
from restow.broker.client.engine.chains import Holders, prefix_to_proto
from restow.broker.client.engine.open_handoffs import OpenHandoffs
from restow.broker.client.engine.prefix_side import PrefixSide
from restow.broker.errors import LayoutFormError, ModelMismatchError, RequestError
from restow.broker.layout import Layout, ModelIdentity, check_layout, digest
from restow.broker.layout.difference import Difference, differences
from restow.broker.layout.json_form import layout_from_json, layout_to_json
from restow.broker.layout.values import IDENTITY_PARTS
from restow.broker.planner import make_plan
from restow.broker.rpc import wire
from restow.broker.server.serve import RunningBroker
from restow.v1 import broker_pb2 as pb
from restow.v1 import broker_pb2_grpc

HERE = model_layout()
PARTS = ("name", *IDENTITY_PARTS)


def other(part: str, value: str = "other", layout: Layout = HERE) -> Layout:
    changed: Any = {part: value}
    return replace(layout, model=replace(layout.model, **changed))


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("value", ["other", ""], ids=["another", "none"])
def test_layouts_that_differ_in_any_part_are_refused(part: str, value: str) -> None:
    here = other(part, "one")
    there = other(part, value)
    for source, destination in ((here, there), (there, here)):
        with pytest.raises(ModelMismatchError) as caught:
            make_plan(source, destination)
        assert caught.value.reason == "MODEL_MISMATCH"
        ours, theirs = source.model.identity, destination.model.identity
        assert caught.value.subject == {"source": str(ours), "destination": str(theirs)}
        assert str(ours) in caught.value.message
        assert str(theirs) in caught.value.message
        assert "Run both engines from one checkpoint" in caught.value.message
    assert make_plan(here, here)


@pytest.mark.parametrize("part", PARTS)
def test_every_part_is_in_the_digest_and_comes_through_each_form(part: str) -> None:
    there = other(part)
    assert digest(there) != digest(HERE)
    assert digest(other(part, "")) != digest(there)
    assert wire.layout_from_proto(wire.layout_to_proto(there)) == there
    assert layout_from_json(layout_to_json(there)) == there
    before = getattr(HERE.model, part) or "none"
    assert differences(HERE, there) == [Difference("model", part, before, "other")]


def test_parts_are_not_taken_for_each_other() -> None:
    digests = {digest(other(part, "same", other("revision", ""))) for part in IDENTITY_PARTS}
    assert len(digests) == len(IDENTITY_PARTS)


def test_json_leaves_out_what_is_empty_and_refuses_what_is_no_text() -> None:
    data = layout_to_json(HERE)
    assert {"revision", "adapter", "quantisation"} & set(data["model"]) == {"revision"}
    data["model"]["adapter"] = 7
    with pytest.raises(LayoutFormError, match=r"model\.adapter"):
        layout_from_json(data)


@pytest.mark.parametrize("part", IDENTITY_PARTS)
def test_a_part_has_a_sensible_length(part: str) -> None:
    check_layout(other(part, "x" * 256))
    with pytest.raises(LayoutFormError, match=f"the model's {part} has 257 characters"):
        check_layout(other(part, "x" * 257))


def test_people_read_what_there_is_and_what_is_not() -> None:
    assert (
        str(ModelIdentity("m", "v1", "", "fp8"))
        == "'m' (revision 'v1', no adapter, quantisation 'fp8')"
    )


async def test_two_checkpoints_of_one_architecture_hand_nothing_over(
    running: RunningBroker,
) -> None:
    async with (
        EngineSession("p", "p-life", HERE, running.address) as p,
        EngineSession("d", "d-life", other("revision", "v2"), running.address) as d,
    ):
        freed, asked = p.publish("h", P_BLOCKS, POSITION), d.request("h", D_BLOCKS)
        for end in (await asyncio.wait_for(asked, WAIT_S), await asyncio.wait_for(freed, WAIT_S)):
            assert (end.state, end.reason) == ("FAILED", "MODEL_MISMATCH")
            assert "revision 'v1'" in end.detail
            assert "revision 'v2'" in end.detail


async def test_engines_go_on_with_new_weights_and_hand_over_to_those_alone_that_have_them(
    running: RunningBroker,
) -> None:
    async with pair(running.address, 1, 1) as both:
        p, d = both.p, both.d
        waits = d.request("waits", D_BLOCKS)
        p.set_revision("v2")
        d.set_revision("v2")
        assert (await asyncio.wait_for(waits, WAIT_S)).reason == "REVISION_CHANGED"
        freed, asked = p.publish("h", P_BLOCKS, POSITION), d.request("h", D_BLOCKS)
        await both.p_agents[0].fence("h")
        assert (await asyncio.wait_for(asked, WAIT_S)).done
        assert (await asyncio.wait_for(freed, WAIT_S)).done
        p.set_revision("v3")
        p.publish("other", P_BLOCKS, POSITION)
        ended = await asyncio.wait_for(d.request("other", D_BLOCKS), WAIT_S)
        assert ended.reason == "MODEL_MISMATCH"
        with AdminClient(running.address) as admin:
            told = await asyncio.to_thread(admin.engines)
        assert {one.engine_id: one.revision for one in told} == {"p": "v3", "d": "v2"}
        for wrong in ("", "x" * 257):
            with pytest.raises(RequestError, match="a revision must have"):
                p.set_revision(wrong)


async def test_the_open_session_alone_says_which_weights_an_engine_has(
    running: RunningBroker,
) -> None:
    # A call of a process that was killed may arrive after the registration of the next process.
    late = pb.RegisterEngineRequest(
        engine=pb.EngineRef(engine_id="p", incarnation="1"),
        layout=wire.layout_to_proto(HERE),
        revision="v3",
    )
    members = running.hub.directory.members.engines
    async with grpc.aio.insecure_channel(running.address) as channel:
        stub = broker_pb2_grpc.BrokerStub(channel)
        async with EngineSession("p", "1", HERE, running.address) as p:
            p.set_revision("v2")
            (engine,) = members.values()
            await until(lambda: engine.revision == "v2")
            await stub.RegisterEngine(late)
            assert engine.revision == "v2"


async def test_a_broker_that_starts_anew_is_told_the_present_revision_first() -> None:
    layout = model_layout()
    async with broker() as first:
        address = first.address
        p, d = (EngineSession(name, "1", layout, address) for name in "pd")
        for session in (p, d):
            await session.start()
            session.set_revision("v2")
        freed, asked = p.publish("h", P_BLOCKS, POSITION), d.request("h", D_BLOCKS)
        await until(lambda: len(first.hub.directory.ledger.live) == 1)
    # Said while there is no broker: what D asked for under the other revision ends.
    stale = d.request("stale", D_BLOCKS)
    d.set_revision("v3")
    fresh = d.request("fresh", D_BLOCKS)
    async with broker(listen=address) as second:
        members = second.hub.directory.members.engines
        await until(lambda: len(members) == len("pd"))
        agents = [await FakeAgent(one, layout, 0, PAGES).connect() for one in (p, d)]
        for one in (asked, stale):
            ended = await asyncio.wait_for(one, WAIT_S)
            assert (ended.state, ended.reason) == ("FAILED", "REVISION_CHANGED")
        revisions = {one.key.engine_id: one.revision for one in members.values()}
        assert revisions == {"p": "v2", "d": "v3"}
        p.set_revision("v3")
        published = p.publish("fresh", P_BLOCKS, POSITION)
        # A fence that overtakes the word on another stream counts for nothing.
        await until(lambda: second.hub.directory.ledger.find("default", "fresh").source is not None)
        await agents[0].fence("fresh")
        assert (await asyncio.wait_for(fresh, WAIT_S)).done
        assert (await asyncio.wait_for(published, WAIT_S)).done
        assert (await asyncio.wait_for(freed, WAIT_S)).reason == "REVISION_CHANGED"
        for agent in agents:
            await agent.drop()
        await p.close()
        await d.close()


async def test_a_state_that_arrives_as_the_weights_are_replaced_is_not_done() -> None:
    handoffs = OpenHandoffs(lambda _: True)
    demand = pb.EngineMessage(request=pb.Demand(handoff_id="h", timeout_ms=1000))
    asked = handoffs.ask("h", demand)
    handoffs.revision = "v2"
    handoffs.finish(HandoffEnded("h", "DONE", "", "", 1, 1), demand.message_id)
    assert (await asked).reason == "REVISION_CHANGED"
    assert asked.pages_free.done()


async def test_an_offer_of_other_weights_is_declined_by_the_session() -> None:
    heard: list[Offer] = []
    said: list[pb.EngineMessage] = []

    def send(message: pb.EngineMessage) -> bool:
        said.append(message)
        return True

    side = PrefixSide("e", send, find_nobody, heard.append, None, None, None, None)
    offer = pb.Offer(handoff_id="h", prefix=prefix_to_proto(STATE), position_tokens=64)
    offer.prefix.revision = "v1"
    side.hear(pb.EngineEvent(offer=offer))
    assert [one.prefix for one in heard] == [STATE]
    side.revise("v2")
    side.hear(pb.EngineEvent(offer=offer))
    assert [one.prefix for one in heard] == [STATE]
    assert said[-1].decline_offer.handoff_id == "h"


async def find_nobody(chains: object) -> Holders:
    raise AssertionError(f"nobody looks {chains} up")
