"""What the broker refuses names what is wrong, and after each refusal it serves as before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest

from broker.fakes import (
    D_BLOCKS,
    P_BLOCKS,
    PAGES,
    POSITION,
    broker,
    called,
    engine,
    model_layout,
    pair,
    silent,
)
from restow.broker.client import BrokerCallError, EngineSession, content_of
from restow.broker.client.connection.errors import from_rpc_error
from restow.broker.errors import PagesError, RestowError
from restow.broker.layout import DType
from restow.broker.rpc import wire
from restow.v1 import agent_link_pb2 as link
from restow.v1 import broker_pb2 as pb
from restow.v1 import broker_pb2_grpc, layout_pb2

# -- refused layouts ------------------------------------------------------------------------------


def shard_of(message: layout_pb2.Layout, field: str, rank: int) -> layout_pb2.Shard:
    return next(one for one in message.ranks[rank].shards if one.field == field)


def cut_a_hole(message: layout_pb2.Layout) -> None:
    shard_of(message, "layers.1.k", 1).box[0].start = 1
    shards = message.ranks[1].shards
    del shards[[one.field for one in shards].index("layers.1.k")]


def overlap_halves(message: layout_pb2.Layout) -> None:
    span = shard_of(message, "layers.0.ssm", 1).box[0]
    span.start, span.stop = span.start - 1, span.stop - 1


def turn_a_stride(message: layout_pb2.Layout) -> None:
    shard_of(message, "layers.0.ssm", 0).strides_bytes[0] *= -1


def stretch_a_stride(message: layout_pb2.Layout) -> None:
    shard_of(message, "layers.0.ssm", 0).strides_bytes[0] = 2**62


def disagree_on_dtype(message: layout_pb2.Layout) -> None:
    shard_of(message, "layers.1.k", 1).dtype = layout_pb2.DATA_TYPE_FLOAT16


def name_no_dtype(message: layout_pb2.Layout) -> None:
    shard_of(message, "layers.1.k", 1).dtype = layout_pb2.DATA_TYPE_UNSPECIFIED


def empty_a_box(message: layout_pb2.Layout) -> None:
    shard_of(message, "layers.1.k", 0).box[0].stop = 0


@pytest.mark.parametrize(
    ("spoil", "reason", "subject"),
    [
        (cut_a_hole, "LAYOUT_HOLE", "layers.1.k head [1, 2)"),
        (overlap_halves, "LAYOUT_OVERLAP", "layers.0.ssm head"),
        (turn_a_stride, "LAYOUT_STRIDE", "layers.0.ssm head"),
        (stretch_a_stride, "LAYOUT_STRIDE", "layers.0.ssm"),
        (disagree_on_dtype, "LAYOUT_RANKS_DISAGREE", "layers.1.k"),
        (name_no_dtype, "LAYOUT_MALFORMED", "layers.1.k"),
        (empty_a_box, "LAYOUT_MALFORMED", ""),
    ],
)
async def test_a_layout_that_is_refused(
    spoil: Callable[[layout_pb2.Layout], None], reason: str, subject: str
) -> None:
    message = wire.layout_to_proto(model_layout(2))
    spoil(message)
    async with broker() as running, pair(running.address) as both:
        ref = pb.EngineRef(engine_id="wrong", incarnation="1")
        request = pb.RegisterEngineRequest(engine=ref, layout=message)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await broker_pb2_grpc.BrokerStub(both.channel).RegisterEngine(request)
        error = from_rpc_error(caught.value, running.address)
        assert (error.status, error.reason) == ("INVALID_ARGUMENT", reason)
        named = " ".join(error.subject.get(name, "") for name in ("field", "axis", "range"))
        assert named.startswith(subject)
        assert not subject or error.subject["ranks"]
        assert len(running.hub.directory.members.engines) == 2
        await both.hand_over("next")


async def test_a_session_raises_the_refusal_of_its_layout() -> None:
    async with broker() as running:
        layout = model_layout(2)
        half = type(layout)(layout.model, layout.ranks[:1])
        session = EngineSession("half", "1", half, running.address)
        with pytest.raises(BrokerCallError) as caught:
            await session.start()
        assert caught.value.reason == "LAYOUT_HOLE"
        with pytest.raises(BrokerCallError):
            await session.request("h", D_BLOCKS)


# -- refused words --------------------------------------------------------------------------------


async def test_a_broker_that_requires_it_serves_nothing_without_content() -> None:
    content = content_of(range(POSITION), POSITION)
    named: dict[str, Any] = {"position_tokens": POSITION, "content": content}
    async with broker(require_content=True) as running, pair(running.address) as both:
        for asked in (
            both.p.publish("no content of p", P_BLOCKS, POSITION),
            both.d.request("no content of d", D_BLOCKS, position_tokens=POSITION),
        ):
            with pytest.raises(BrokerCallError) as caught:
                await asked
            assert caught.value.reason == "CONTENT_NOT_NAMED"
        asked = both.d.request("no content of p", D_BLOCKS, **named)
        assert (await asked).reason == "PUBLICATION_REFUSED"
        both.p.publish("h", {"attention": [1]}, 0, final=False)  # a chunk names none
        asked = both.d.request("h", D_BLOCKS, **named)
        freed = both.p.publish("h", P_BLOCKS, POSITION, content=content)
        for agent in both.p_agents:
            await agent.fence("h")
        for ended in (await asked, await freed):
            assert (ended.state, ended.content_compared) == ("DONE", True)


async def test_two_models_that_differ() -> None:
    async with broker() as running, pair(running.address) as both:
        async with engine(running.address, "x", layout=model_layout(1, "other")) as (x, _):
            both.p.publish("h", P_BLOCKS, POSITION)
            ended = await x.request("h", D_BLOCKS)
            assert (ended.state, ended.reason) == ("FAILED", "MODEL_MISMATCH")
        await both.hand_over("next")


async def test_keys_that_other_scales_would_turn_into_other_values() -> None:
    plain = model_layout(1)
    *others, last = plain.model.fields
    scaled = replace(plain.model, fields=(*others, replace(last, scales="static v1")))
    async with broker() as running, pair(running.address) as both:
        async with engine(running.address, "x", layout=replace(plain, model=scaled)) as (x, _):
            both.p.publish("h", P_BLOCKS, POSITION)
            ended = await x.request("h", D_BLOCKS)
            assert (ended.state, ended.reason) == ("FAILED", "SCALES_MISMATCH")
            assert "P's elements have no scales, D's have scales 'static v1'" in ended.detail
        await both.hand_over("next")


@pytest.mark.parametrize("allowed", [False, True])
async def test_states_that_would_be_rounded(allowed: bool) -> None:
    narrow = model_layout(1, ssm_dtype=DType.BFLOAT16)
    async with broker(allow_narrowing=allowed) as running, pair(running.address) as both:
        async with engine(running.address, "x", layout=narrow) as (x, _):
            both.p.publish("h", P_BLOCKS, POSITION)
            for agent in both.p_agents:
                await agent.fence("h")
            ended = await x.request("h", D_BLOCKS)
            expected = ("DONE", "") if allowed else ("FAILED", "NARROWING_NOT_ALLOWED")
            assert (ended.state, ended.reason) == expected
            if not allowed:
                assert "layers.0.ssm: P holds float32, but D wants bfloat16" in ended.detail
        await both.hand_over("next")


async def test_pages_that_are_not_there() -> None:
    async with broker() as running, pair(running.address) as both:
        wrong = {"attention": [1, 2, PAGES], "state": [4]}
        for ask in (both.p.publish("h", wrong, POSITION), both.d.request("i", wrong)):
            with pytest.raises(BrokerCallError) as caught:
                await ask
            assert (caught.value.status, caught.value.reason) == (
                "OUT_OF_RANGE",
                "PAGE_OUT_OF_RANGE",
            )
            assert f"block {PAGES} is outside of [0, {PAGES})" in caught.value.message
        with pytest.raises(PagesError):
            both.p.publish("h", {"attention": [-1], "state": [4]}, POSITION)
        with pytest.raises(PagesError):
            both.p.publish("h", {"attention": [2**31], "state": [4]}, POSITION)
        late = await both.d.request("h", D_BLOCKS)
        assert (late.state, late.reason) == ("FAILED", "PUBLICATION_REFUSED")
        await both.hand_over("next")


async def test_unary_refusals_carry_their_subject() -> None:
    async with broker() as running, pair(running.address) as both:
        stub = broker_pb2_grpc.BrokerStub(both.channel)
        blocks = wire.block_lists({"attention": [PAGES]})
        publication = pb.Publication(handoff_id="h", blocks=blocks)
        stranger = pb.EngineRef(engine_id="nobody", incarnation="1")
        stale = pb.EngineRef(engine_id="p", incarnation="stale")
        demand = pb.Demand(handoff_id="h", blocks=[wire.block_list("attention", [1], 1)])
        long_lease = pb.Publication(handoff_id="h", lease_ms=10**9)
        cases = [
            (stub.Publish, pb.PublishRequest(engine=both.p.ref, publication=publication)),
            (stub.Publish, pb.PublishRequest(engine=stranger, publication=publication)),
            (stub.Publish, pb.PublishRequest(engine=stale, publication=publication)),
            (stub.Publish, pb.PublishRequest(engine=both.p.ref, publication=long_lease)),
            (stub.Request, pb.RequestRequest(engine=both.d.ref, demand=demand)),
            (stub.Cancel, pb.CancelRequest(engine=both.d.ref)),
        ]
        heard = []
        for method, request in cases:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await method(request)  # type: ignore[operator]
            error = from_rpc_error(caught.value, running.address)
            heard.append((error.status, error.reason, error.subject))
        assert heard == [
            (
                "OUT_OF_RANGE",
                "PAGE_OUT_OF_RANGE",
                {"engine": "p", "group": "attention", "page": f"{PAGES}", "range": f"[0, {PAGES})"},
            ),
            ("NOT_FOUND", "ENGINE_UNKNOWN", {"engine": "nobody"}),
            ("NOT_FOUND", "ENGINE_UNKNOWN", {"engine": "p"}),
            ("INVALID_ARGUMENT", "ARGUMENT_INVALID", {"field": "lease_ms"}),
            ("INVALID_ARGUMENT", "ARGUMENT_INVALID", {"field": "first_block"}),
            ("NOT_FOUND", "HANDOFF_UNKNOWN", {"handoff": ""}),
        ]
        await both.hand_over("next")


async def test_a_handoff_that_nobody_publishes() -> None:
    async with broker() as running, pair(running.address) as both:
        ended = await both.d.request("h", D_BLOCKS, timeout_ms=100)
        assert (ended.state, ended.reason) == ("EXPIRED", "NOT_PUBLISHED")
        await both.hand_over("next")


async def test_d_asks_twice() -> None:
    async with broker() as running, pair(running.address) as both:
        one = both.d.request("h", D_BLOCKS)
        two = both.d.request("h", D_BLOCKS)
        three = both.d.request("h", {"attention": [21, 22, 23], "state": [24]})
        for again in (two, three):
            with pytest.raises(BrokerCallError) as caught:
                await again
            assert caught.value.reason == "HANDOFF_CONFLICT"
        both.p.publish("h", P_BLOCKS, POSITION)
        for agent in both.p_agents:
            await agent.fence("h")
        assert (await one).done
        for blocks in (D_BLOCKS, {"attention": [21, 22, 23], "state": [24]}):
            with pytest.raises(BrokerCallError, match="use a new id") as caught:
                await both.d.request("h", blocks)
            assert caught.value.reason == "HANDOFF_CONFLICT"


async def test_a_second_demand_that_is_left_at_once_leaves_the_first() -> None:
    async with broker() as running, pair(running.address) as both:
        one = both.d.request("h", D_BLOCKS)
        two = both.d.request("h", {"attention": [21, 22, 23], "state": [24]})
        two.cancel()
        await two.pages_free
        both.p.publish("h", P_BLOCKS, POSITION)
        for agent in both.p_agents:
            await agent.fence("h")
        assert (await one).done


async def test_another_engine_may_not_take_a_side(monkeypatch: pytest.MonkeyPatch) -> None:
    async with broker() as running, pair(running.address) as both:
        address = running.address
        async with engine(address, "other", 1) as (other, agents):
            published = called(running.hub.directory, "publish", monkeypatch)
            both.p.publish("h", P_BLOCKS, POSITION)
            await published.get()
            with pytest.raises(BrokerCallError) as caught:
                await other.publish("h", P_BLOCKS, POSITION)
            assert caught.value.reason == "HANDOFF_OWNED"
            # A fence that is refused costs the agent nothing but that fence.
            await agents[0].fence("h")
            await agents[0].fence("")
            await agents[0].fence("mine")
            other.publish("mine", P_BLOCKS, POSITION)
            assert (await both.d.request("mine", D_BLOCKS)).done


# -- agents that die, lie or stay silent ----------------------------------------------------------


async def test_a_dead_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    async with broker() as running, pair(running.address, 1, 2) as both:
        lost = called(running.hub.directory.connections, "remove", monkeypatch)
        await both.d_agents[1].drop()
        await lost.get()
        both.p.publish("h", P_BLOCKS, POSITION)
        await both.p_agents[0].fence("h")
        ended = await both.d.request("h", D_BLOCKS, timeout_ms=500)
        assert ended.state in ("FAILED", "EXPIRED")
        assert "engine d: no agent is connected for ranks [1]" in ended.detail
        await both.d_agents[1].connect()
        await both.hand_over("next")


async def test_an_agent_that_dies_while_reading() -> None:
    async with broker(grant_s=0.3, settle_grace_s=0.1) as running, pair(running.address) as both:
        both.d_agents[0].answers = silent
        released = both.p.publish("h", P_BLOCKS, POSITION)
        for agent in both.p_agents:
            await agent.fence("h")
        ended = both.d.request("h", D_BLOCKS)
        await both.d_agents[0].order("execute")
        await both.d_agents[0].drop()
        assert ((await released).state, (await released).reason) == ("FAILED", "AGENT_LOST")
        # It may still write: only when it is back, D has its pages.
        assert not ended.done()
        await both.d_agents[0].connect()
        assert await released == await ended


async def test_p_does_not_wait_for_a_silent_agent_longer_than_its_grant() -> None:
    async with broker(grant_s=0.1, settle_grace_s=0.1) as running, pair(running.address) as both:
        answers, both.d_agents[0].answers = both.d_agents[0].answers, silent
        released = both.p.publish("h", P_BLOCKS, POSITION)
        for agent in both.p_agents:
            await agent.fence("h")
        asked = both.d.request("h", D_BLOCKS)
        ended = await released
        assert (ended.state, ended.reason) == ("FAILED", "READ_DEADLINE")
        assert not asked.done()
        # Its late words change nothing, and the next handoff is as good as any.
        execute = await both.d_agents[0].order("execute")
        late = link.AgentMessage(settled=link.Settled(handoff=execute.handoff))
        await both.d_agents[0].say(late)
        assert await asked == ended
        both.d_agents[0].answers = answers
        await both.hand_over("next")


async def test_a_rank_that_reports_a_failure() -> None:
    def fail(order: link.AgentOrder) -> list[link.AgentMessage]:
        if order.WhichOneof("body") != "execute":
            return []
        words = link.Settled(
            handoff=order.execute.handoff, reason="TRANSFER_FAILED", detail="x" * 10_000
        )
        return [link.AgentMessage(settled=words)]

    async with broker() as running, pair(running.address) as both:
        answers, both.d_agents[0].answers = both.d_agents[0].answers, fail
        both.p.publish("h", P_BLOCKS, POSITION)
        for agent in both.p_agents:
            await agent.fence("h")
        ended = await both.d.request("h", D_BLOCKS)
        assert (ended.state, ended.reason) == ("FAILED", "TRANSFER_FAILED")
        assert len(ended.detail) < 1000
        both.d_agents[0].answers = answers
        await both.hand_over("next")


async def test_an_engine_that_unregisters_ends_the_streams_of_its_agents() -> None:
    async with broker() as running, engine(running.address, "p", 2) as (session, agents):
        await session.close()
        for agent in agents:
            await agent.ended.wait()
            assert isinstance(agent.end, RestowError)
            assert agent.end.reason == "ENGINE_UNKNOWN"
        assert not running.hub.agents
        assert not running.hub.directory.members.engines
