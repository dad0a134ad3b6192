"""Streams: garbage, slow readers, broken connections, and a broker that is restarted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from agent_harness.waiting import until
from broker.fakes import (
    D_BLOCKS,
    P_BLOCKS,
    POSITION,
    FakeAgent,
    Pair,
    broker,
    engine,
    model_layout,
    pair,
)
from broker.guarded import error_of
from restow.broker.client.connection.channel import CHANNEL_OPTIONS, open_channel
from restow.broker.client.connection.errors import BrokerCallError, from_rpc_error
from restow.broker.client.engine.handoff_futures import HandoffEnded
from restow.broker.core.common.keys import AgentKey, EngineKey
from restow.broker.core.engines import flow
from restow.broker.errors import RestowError
from restow.broker.rpc import wire
from restow.broker.rpc.wire_program import PROGRAM_FORM
from restow.broker.server.base import hub
from restow.broker.server.serve import RunningBroker
from restow.v1 import agent_link_pb2 as link
from restow.v1 import agent_link_pb2_grpc, broker_pb2_grpc
from restow.v1 import broker_pb2 as pb


async def end_of(call: Any) -> RestowError | None:
    """Return the error with which a stream ends; its messages are read and dropped."""
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error, "broker")
    return None


async def batches(*given: Any) -> AsyncIterator[Any]:
    for batch in given:
        yield batch


def agent_batch(**body: Any) -> link.ConnectRequest:
    return link.ConnectRequest(messages=[link.AgentMessage(**body)])


def hello_of(*engine: str) -> link.ConnectRequest:
    ref = pb.EngineRef(**dict(zip(("engine_id", "incarnation"), engine, strict=False)))
    return agent_batch(hello=link.Hello(engine=ref if engine else None))


WRONG_BEGINNINGS = {
    "empty batch": (link.ConnectRequest(), "ARGUMENT_INVALID"),
    "no body": (agent_batch(), "ARGUMENT_INVALID"),
    "no hello": (agent_batch(fenced=link.Fenced(handoff_id="h")), "ARGUMENT_INVALID"),
    "no engine": (hello_of(), "ARGUMENT_INVALID"),
    "no life": (hello_of("p"), "ARGUMENT_INVALID"),
    "unknown engine": (hello_of("x", "1"), "ENGINE_UNKNOWN"),
    "another life": (hello_of("p", "?"), "ENGINE_UNKNOWN"),
}


async def test_a_stream_of_an_agent_that_begins_wrong(running: RunningBroker, both: Pair) -> None:
    running.hub.expected.wait_s = 0
    for name, (first, reason) in WRONG_BEGINNINGS.items():
        call = agent_link_pb2_grpc.AgentLinkStub(both.channel).Connect(batches(first))
        error = await end_of(call)
        assert error is not None, name
        assert error.reason == reason, name
    await both.hand_over("next")


async def test_a_hello_that_is_refused_leaves_the_present_agent_alone(both: Pair) -> None:
    hello = link.Hello()
    hello.CopyFrom(both.p_agents[0].hello)
    connect = agent_link_pb2_grpc.AgentLinkStub(both.channel).Connect
    hello.rank = 9
    error = await end_of(connect(batches(agent_batch(hello=hello))))
    assert error is not None
    assert (error.reason, error.subject["rank"]) == ("AGENT_UNKNOWN", "9")
    hello.rank = 0
    del hello.regions[0]
    error = await end_of(connect(batches(agent_batch(hello=hello))))
    assert error is not None
    assert error.reason == "AGENT_REGIONS_MISMATCH"
    hello.CopyFrom(both.p_agents[0].hello)
    for form in (0, PROGRAM_FORM - 1, PROGRAM_FORM + 1):
        hello.program_form = form
        error = await end_of(connect(batches(agent_batch(hello=hello))))
        assert error is not None
        assert error.reason == "AGENT_RELEASE_DIFFERS"
    await both.hand_over("next")


@pytest.mark.parametrize(
    "second",
    [link.AgentMessage(), link.AgentMessage(hello=link.Hello())],
    ids=["no body", "second hello"],
)
async def test_a_message_that_an_agent_may_not_send_ends_its_stream(
    both: Pair, second: link.AgentMessage
) -> None:
    await both.p_agents[0].say(second)
    await both.p_agents[0].ended.wait()
    error = both.p_agents[0].end
    assert error is not None
    assert error.reason == "ARGUMENT_INVALID"
    await both.p_agents[0].drop()
    again = FakeAgent(both.p, model_layout(2), 0, 64)
    both.p_agents[0] = await again.connect()
    await both.hand_over("next")
    await again.drop()


async def test_an_agent_that_connects_anew_replaces_its_old_stream(both: Pair) -> None:
    old = both.p_agents[0]
    both.p_agents[0] = await FakeAgent(both.p, model_layout(2), 0, 64).connect()
    await old.ended.wait()
    assert old.end is not None
    assert old.end.reason == "AGENT_REPLACED"
    await both.hand_over("next")
    await both.p_agents[0].drop()


async def test_empty_batches_mean_nothing(running: RunningBroker, both: Pair) -> None:
    await both.p_agents[0].say()
    session = broker_pb2_grpc.BrokerStub(both.channel).Session
    assert await end_of(session(batches())) is None
    async with engine(running.address, "x", agents=False) as (x, _):
        empty = batches(pb.SessionRequest(engine=x.ref), pb.SessionRequest())
        assert await end_of(session(empty)) is None
    await both.hand_over("next")


async def test_a_session_of_an_engine_that_is_not_registered(running: RunningBroker) -> None:
    async with open_channel(running.address) as channel:
        session = broker_pb2_grpc.BrokerStub(channel).Session
        ref = pb.EngineRef(engine_id="nobody", incarnation="1")
        error = await end_of(session(batches(pb.SessionRequest(engine=ref))))
        assert error is not None
        assert error.reason == "ENGINE_UNKNOWN"


async def test_words_without_a_body_are_refused_by_number(running: RunningBroker) -> None:
    async with engine(running.address, "p", agents=False) as (p, _):
        async with open_channel(running.address) as channel:
            request = pb.SessionRequest(
                engine=p.ref, messages=[pb.EngineMessage(message_id=7), pb.EngineMessage()]
            )
            refused = [
                event.refused
                async for response in broker_pb2_grpc.BrokerStub(channel).Session(batches(request))
                for event in response.events
                if event.HasField("refused")
            ]
        assert [(one.message_id, one.reason) for one in refused] == [
            (7, "ARGUMENT_INVALID"),
            (0, "ARGUMENT_INVALID"),
        ]


async def test_a_message_over_the_limit(running: RunningBroker, both: Pair) -> None:
    big = pb.PublishRequest(
        engine=both.p.ref,
        publication=pb.Publication(
            handoff_id="h", blocks=[pb.BlockList(group="kv", block_ids=bytes(17 << 20))]
        ),
    )
    options = [one for one in CHANNEL_OPTIONS if "send" not in one[0]]
    options.append(("grpc.max_send_message_length", -1))
    async with grpc.aio.insecure_channel(running.address, options=options) as channel:
        caught = await error_of(broker_pb2_grpc.BrokerStub(channel).Publish(big))
    assert caught.status == "RESOURCE_EXHAUSTED"
    await both.hand_over("next")


async def registered(both: Pair, name: str) -> pb.EngineRef:
    """Register an engine whose sessions the test opens: a client's would come back."""
    ref = pb.EngineRef(engine_id=name, incarnation="1")
    layout = wire.layout_to_proto(model_layout(1))
    stub = broker_pb2_grpc.BrokerStub(both.channel)
    await stub.RegisterEngine(pb.RegisterEngineRequest(engine=ref, layout=layout))
    return ref


async def test_a_slow_reader_of_a_session_loses_it() -> None:
    async with broker(max_queue=512) as running, pair(running.address) as both:
        slow, key = await registered(both, "slow"), EngineKey("default", "slow")
        call = broker_pb2_grpc.BrokerStub(both.channel).Session()
        await call.write(pb.SessionRequest(engine=slow))
        await until(lambda: key in running.hub.engines)
        cancel = pb.EngineMessage(cancel=pb.Cancellation(handoff_id="x" * 250))
        batch = pb.SessionRequest(messages=[cancel] * 512)

        async def write_until_lost() -> None:
            while key in running.hub.engines:
                await call.write(batch)

        # A write beside the loss waits for a broker that reads no more, until the end is read.
        writing = asyncio.create_task(write_until_lost())
        await until(lambda: key not in running.hub.engines)
        # When it reads at last it learns why; nobody else noticed.
        error = await end_of(call)
        writing.cancel()
        assert error is not None
        assert error.reason == "QUEUE_FULL"
        await both.hand_over("next")


async def test_who_writes_for_ever_and_reads_nothing_is_not_served_for_ever(
    running: RunningBroker, both: Pair
) -> None:
    # The broker takes nothing from a stream that was replaced, even if its writer reads nothing.
    refused = running.hub.directory.ledger.statistics.refused
    engine_ref = await registered(both, "deaf")
    stub = broker_pb2_grpc.BrokerStub(both.channel)
    deaf, second = stub.Session(), stub.Session()
    await deaf.write(pb.SessionRequest(engine=engine_ref))
    cancel = pb.EngineMessage(cancel=pb.Cancellation(handoff_id="x" * 1000))
    batch = pb.SessionRequest(messages=[cancel] * 512)

    async def write_for_ever() -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await deaf.write(batch)

    writing = asyncio.create_task(write_for_ever())
    await until(lambda: refused.total() > 16_384)  # answers wait for a reader
    await second.write(pb.SessionRequest(engine=engine_ref))
    await second.read()
    before = refused.copy()
    await asyncio.wait({writing}, timeout=0.5)
    assert refused == before
    await both.hand_over("next")
    assert await end_of(deaf) is not None  # SESSION_REPLACED, or what its broken writing says
    writing.cancel()
    second.cancel()


async def test_a_slow_agent_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    # As it is, so many are not under way that the queue of one agent could be full.
    monkeypatch.setattr(flow, "LEAST_SMALL_READS", 1 << 20)
    async with broker(max_queue=512) as running, pair(running.address, 1, 1) as both:
        connected, key = running.hub.agents, AgentKey(EngineKey("default", "d"), 0)
        await both.d_agents[0].drop()
        await until(lambda: key not in connected)
        slow = agent_link_pb2_grpc.AgentLinkStub(both.channel).Connect()
        for region in both.d_agents[0].hello.regions:
            region.page_count = 1 << 22
        await slow.write(agent_batch(hello=both.d_agents[0].hello))
        await until(lambda: key in connected)
        published: list[asyncio.Future[HandoffEnded]] = []
        while key in connected:
            count = len(published)
            # Not the blocks of "next": the broker may not give them again before it knows that the
            # slow agent does not write to them.
            name, first = f"h{count}", 1024 * (count + 1)
            blocks = {"attention": range(first, first + 1024), "state": [first]}
            published.append(both.p.publish(name, P_BLOCKS, POSITION))
            await both.p_agents[0].fence(name)
            both.d.request(name, blocks)
            await asyncio.sleep(0)
        slow.cancel()
        for index in range(len(published)):  # or all of them would be granted anew
            both.d.cancel(f"h{index}")
            both.p.cancel(f"h{index}")
        await asyncio.gather(*published)
        await both.d_agents[0].connect()
        await both.hand_over("next")


async def test_a_stream_that_is_dropped_midway(running: RunningBroker, both: Pair) -> None:
    async with engine(running.address, "x", agents=False) as (x, _):
        async with open_channel(running.address) as channel:
            call = broker_pb2_grpc.BrokerStub(channel).Session()
            await call.write(pb.SessionRequest(engine=x.ref))
            await call.read()
            both.d.request("h", D_BLOCKS)
            call.cancel()
        await until(lambda: x.is_open)
        await both.hand_over("next")


@pytest.mark.parametrize("number", [0, 7], ids=["no number", "a number"])
async def test_d_hears_of_the_end_before_p(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # The order also holds for a message without a number, which no client of Restow sends.
    monkeypatch.setattr(hub, "P_HEARS_AFTER_S", 600.0)
    async with broker() as running, pair(running.address) as both:
        released = await both.published("h")
        demand = pb.Demand(handoff_id="h", blocks=wire.block_lists(D_BLOCKS))
        said = pb.EngineMessage(message_id=number, request=demand)
        call = broker_pb2_grpc.BrokerStub(both.channel).Session()
        await call.write(pb.SessionRequest(engine=both.d.ref, messages=[said]))
        events = [event async for answer in call_until_ended(call) for event in answer.events]
        assert events[-1].ended.state == pb.HANDOFF_STATE_DONE
        assert events[-1].ended.demand == number
        with pytest.raises(BrokerCallError):  # its answer comes behind all that P was told
            await both.p.publish("bad", {"no group": [1]}, POSITION)
        assert not released.done()


async def call_until_ended(call: Any) -> AsyncIterator[pb.SessionResponse]:
    """Yield what a session is told, up to the first end of a handoff."""
    async for answer in call:
        yield answer
        if any(event.HasField("ended") for event in answer.events):
            return
