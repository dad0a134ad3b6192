"""What the broker refuses names what is wrong, and after each refusal it serves as before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from broker.fakes import (
    D_BLOCKS,
    P_BLOCKS,
    PAGES,
    POSITION,
    Pair,
    broker,
    engine,
    model_layout,
    pair,
)
from broker.guarded import error_of, reason_of
from restow.broker.client import BrokerCallError, EngineSession, content_of
from restow.broker.errors import RestowError
from restow.broker.layout import DType
from restow.broker.rpc import wire
from restow.broker.server.serve import RunningBroker
from restow.v1 import broker_pb2 as pb
from restow.v1 import broker_pb2_grpc, layout_pb2

# -- refused layouts ------------------------------------------------------------------------------


def shard_of(message: layout_pb2.Layout, field: str, rank: int) -> layout_pb2.Shard:
    return next(one for one in message.ranks[rank].shards if one.field == field)


def cut_a_hole(message: layout_pb2.Layout) -> None:
    shard_of(message, "layers.1.k", 1).box[0].start = 1
    shards = message.ranks[1].shards
    del shards[[one.field for one in shards].index("layers.1.k")]


def name_no_dtype(message: layout_pb2.Layout) -> None:
    shard_of(message, "layers.1.k", 1).dtype = layout_pb2.DATA_TYPE_UNSPECIFIED


def empty_a_box(message: layout_pb2.Layout) -> None:
    shard_of(message, "layers.1.k", 0).box[0].stop = 0


def forget_scales(message: layout_pb2.Layout) -> None:
    field = next(one for one in message.model.fields if one.name == "layers.1.k")
    field.scales = "unknown"


@pytest.mark.parametrize(
    ("spoil", "reason", "subject"),
    [
        (cut_a_hole, "LAYOUT_HOLE", "layers.1.k head [1, 2)"),
        (name_no_dtype, "LAYOUT_MALFORMED", "layers.1.k"),
        (empty_a_box, "LAYOUT_MALFORMED", ""),
        (forget_scales, "SCALES_UNKNOWN", ""),
    ],
)
async def test_a_layout_that_is_refused(
    running: RunningBroker,
    both: Pair,
    spoil: Callable[[layout_pb2.Layout], None],
    reason: str,
    subject: str,
) -> None:
    message = wire.layout_to_proto(model_layout(2))
    spoil(message)
    ref = pb.EngineRef(engine_id="wrong", incarnation="1")
    request = pb.RegisterEngineRequest(engine=ref, layout=message)
    error = await error_of(broker_pb2_grpc.BrokerStub(both.channel).RegisterEngine(request))
    assert (error.status, error.reason) == ("INVALID_ARGUMENT", reason)
    named = " ".join(error.subject.get(name, "") for name in ("field", "axis", "range"))
    assert named.startswith(subject)
    assert not subject or error.subject["ranks"]
    assert len(running.hub.directory.members.engines) == 2
    await both.hand_over("next")


async def test_a_session_raises_the_refusal_of_its_layout(running: RunningBroker) -> None:
    layout = model_layout(2)
    half = type(layout)(layout.model, layout.ranks[:1])
    session = EngineSession("half", "1", half, running.address)
    assert await reason_of(session.start()) == "LAYOUT_HOLE"
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
            assert await reason_of(asked) == "CONTENT_NOT_NAMED"
        asked = both.d.request("no content of p", D_BLOCKS, **named)
        assert (await asked).reason == "PUBLICATION_REFUSED"
        both.p.publish("h", {"attention": [1]}, 0, final=False)  # a chunk names none
        asked = both.d.request("h", D_BLOCKS, **named)
        freed = await both.published("h", content=content)
        for ended in (await asked, await freed):
            assert (ended.state, ended.content_compared) == ("DONE", True)


@pytest.mark.parametrize("allowed", [False, True])
async def test_states_that_would_be_rounded(allowed: bool) -> None:
    narrow = model_layout(1, ssm_dtype=DType.BFLOAT16)
    async with broker(allow_narrowing=allowed) as running, pair(running.address) as both:
        async with engine(running.address, "x", layout=narrow) as (x, _):
            await both.published("h")
            ended = await x.request("h", D_BLOCKS)
            expected = ("DONE", "") if allowed else ("FAILED", "NARROWING_NOT_ALLOWED")
            assert (ended.state, ended.reason) == expected
            if not allowed:
                assert "layers.0.ssm: P holds float32, but D wants bfloat16" in ended.detail
        await both.hand_over("next")


async def test_unary_refusals_carry_their_subject(both: Pair) -> None:
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
        error = await error_of(method(request))  # type: ignore[operator]
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


async def test_d_asks_twice(both: Pair) -> None:
    one = both.d.request("h", D_BLOCKS)
    two = both.d.request("h", D_BLOCKS)
    three = both.d.request("h", {"attention": [21, 22, 23], "state": [24]})
    for again in (two, three):
        assert await reason_of(again) == "HANDOFF_CONFLICT"
    await both.published("h")
    assert (await one).done
    for blocks in (D_BLOCKS, {"attention": [21, 22, 23], "state": [24]}):
        with pytest.raises(BrokerCallError, match="use a new id") as caught:
            await both.d.request("h", blocks)
        assert caught.value.reason == "HANDOFF_CONFLICT"


# -- agents that die, lie or stay silent ----------------------------------------------------------


async def test_an_engine_that_unregisters_ends_the_streams_of_its_agents(
    running: RunningBroker,
) -> None:
    async with engine(running.address, "p", 2) as (session, agents):
        await session.close()
        for agent in agents:
            await agent.ended.wait()
            assert isinstance(agent.end, RestowError)
            assert agent.end.reason == "ENGINE_UNKNOWN"
        assert not running.hub.agents
        assert not running.hub.directory.members.engines
