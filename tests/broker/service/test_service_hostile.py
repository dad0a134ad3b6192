"""Hostile words are refused with a reason, whatever they are, and the next ones are served."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from itertools import product
from typing import Any

import grpc

from broker.fakes import (
    D_BLOCKS,
    P_BLOCKS,
    POSITION,
    FakeAgent,
    Pair,
    broker,
    engine,
    heard,
    model_layout,
    pair,
    silent,
)
from broker.guarded import error_of, reason_of
from restow.broker.client import chain_of
from restow.broker.client.engine.chains import prefix_to_proto
from restow.broker.core.common.keys import EngineKey
from restow.broker.layout.values import MAX_GROUPS
from restow.broker.printable import shown
from restow.broker.rpc import wire
from restow.broker.rpc.status import MAX_MESSAGE_BYTES, MAX_SUBJECT_BYTES
from restow.broker.server.base.outbox import AgentOutbox, EngineOutbox, Outbox
from restow.broker.server.base.standing import Stand
from restow.broker.server.serve import RunningBroker
from restow.broker.server.services.agent_service import AgentLinkService
from restow.broker.server.services.stream_messages import MAX_AT_ONCE, SessionWords, hear_batch
from restow.v1 import admin_pb2, admin_pb2_grpc, broker_pb2_grpc
from restow.v1 import agent_link_pb2 as link
from restow.v1 import broker_pb2 as pb


async def test_a_refusal_has_room_for_its_reason_however_long_the_names_are(both: Pair) -> None:
    stub = broker_pb2_grpc.BrokerStub(both.channel)
    for letter, length in product(("x", "é", "\U0001f600", "\0"), (5000, 1 << 20)):
        ref = pb.EngineRef(engine_id=letter * length, incarnation="1")
        error = await error_of(stub.UnregisterEngine(pb.UnregisterEngineRequest(engine=ref)))
        assert (error.status, error.reason) == ("NOT_FOUND", "ENGINE_UNKNOWN")
        assert len(error.message.encode()) <= MAX_MESSAGE_BYTES
        assert len(error.subject["engine"].encode()) <= MAX_SUBJECT_BYTES
        assert error.subject["engine"].startswith(shown(letter * 10))


async def test_more_or_fewer_handoffs_than_can_be_listed(both: Pair) -> None:
    await both.hand_over("h")
    stub = admin_pb2_grpc.AdminStub(both.channel)
    for limit in (-1, -(2**31)):
        error = await error_of(stub.ListHandoffs(admin_pb2.ListHandoffsRequest(limit=limit)))
        assert (error.reason, error.subject) == ("ARGUMENT_INVALID", {"field": "limit"})
    listed = await stub.ListHandoffs(admin_pb2.ListHandoffsRequest(limit=2**31 - 1))
    assert [one.handoff_id for one in listed.handoffs] == ["h"]


IMPOSSIBLE_REGIONS: list[tuple[str, int]] = [
    ("memory", 77),
    ("device_id", -1),
    *(("page_stride_bytes", size) for size in (0, 1, -1, 2**63 - 1)),
    *(("page_count", count) for count in (0, -1)),
    *(("base_address", address) for address in (0, 2**63 - 1)),
]


async def test_an_agent_of_impossible_memory(running: RunningBroker) -> None:
    async with engine(running.address, "x", agents=False) as (session, _):
        for name, value in [*IMPOSSIBLE_REGIONS, ("staging_bytes", -1)]:
            fake = FakeAgent(session, model_layout(), 0, 64)
            wrong = fake.hello if name == "staging_bytes" else fake.hello.regions[1]
            setattr(wrong, name, value)
            reason = "ARGUMENT_INVALID" if name == "memory" else "AGENT_REGIONS_MISMATCH"
            assert await reason_of(fake.connect()) == reason, (name, value)
            await fake.drop()


async def test_agents_of_all_the_memory_that_there_may_be_are_listed(
    running: RunningBroker,
) -> None:
    async with engine(running.address, "x", agents=False) as (session, _):
        fake = FakeAgent(session, model_layout(), 0, 64)
        for memory, region in zip(fake.hello.regions, model_layout().ranks[0].regions, strict=True):
            memory.base_address = 1
            memory.page_count = (2**63 - 1) // region.page_stride_bytes
        await fake.connect()
        async with grpc.aio.insecure_channel(running.address) as channel:
            stub = admin_pb2_grpc.AdminStub(channel)
            (listed,) = (await stub.ListAgents(admin_pb2.ListAgentsRequest())).agents
        assert listed.region_bytes == 2**63 - 1
        await fake.drop()


async def test_who_waits_for_an_end_is_answered_when_its_engine_goes() -> None:
    # The handoff has failed, but D must not hear so while its agent may still write.
    async with broker(grant_s=0.1, settle_grace_s=0.1) as running, pair(running.address) as both:
        both.d_agents[0].answers = silent
        released = await both.published("h")
        stub = broker_pb2_grpc.BrokerStub(both.channel)
        demand = pb.Demand(handoff_id="h", blocks=wire.block_lists(D_BLOCKS), timeout_ms=500)
        waiting = asyncio.ensure_future(
            stub.Request(pb.RequestRequest(engine=both.d.ref, demand=demand))
        )
        await heard(running, "h", asked=True)
        assert (await released).reason == "READ_DEADLINE"
        assert not waiting.done()
        await stub.UnregisterEngine(pb.UnregisterEngineRequest(engine=both.d.ref))
        assert await reason_of(waiting) == "ENGINE_UNKNOWN"


async def test_a_name_that_is_too_long_is_refused_on_a_session(both: Pair) -> None:
    assert await reason_of(both.p.publish("x" * 100_000, P_BLOCKS, POSITION)) == "ARGUMENT_INVALID"
    caught = await error_of(both.p.publish("h", {"x" * 100_000: [1]}, POSITION))
    assert caught.reason == "PAGES_INVALID"
    assert len(caught.message.encode()) <= MAX_MESSAGE_BYTES
    await both.hand_over("next")


async def test_a_session_has_no_number_of_a_call(both: Pair) -> None:
    # Negative numbers are the broker's own, for demands outside of sessions.
    stub, ref = (
        broker_pb2_grpc.BrokerStub(both.channel),
        pb.EngineRef(engine_id="e", incarnation="1"),
    )
    layout = wire.layout_to_proto(model_layout(1))
    await stub.RegisterEngine(pb.RegisterEngineRequest(engine=ref, layout=layout))
    demand = pb.Demand(handoff_id="h", timeout_ms=200)
    said = pb.EngineMessage(message_id=-1, request=demand)
    stream = stub.Session()
    await stream.write(pb.SessionRequest(engine=ref, messages=[said]))
    heard: list[pb.EngineEvent] = []
    async with asyncio.timeout(5):
        while len(heard) < 2:
            answer = await stream.read()
            assert isinstance(answer, pb.SessionResponse)
            heard += answer.events
    refused = heard[1].refused
    assert (refused.reason, refused.message_id) == ("ARGUMENT_INVALID", -1), heard
    stream.cancel()
    await both.hand_over("next")


async def test_lists_of_blocks_that_no_engine_has_groups_for(
    running: RunningBroker, both: Pair
) -> None:
    stub = broker_pb2_grpc.BrokerStub(both.channel)
    ref = both.p.ref
    one = wire.block_list("attention", [1])
    many = [one] * (MAX_GROUPS + 1)
    whole = pb.Publication(handoff_id="h", blocks=many)
    demand = pb.Demand(handoff_id="h", blocks=many)
    for call in (
        stub.Publish(pb.PublishRequest(engine=ref, publication=whole)),
        stub.Request(pb.RequestRequest(engine=ref, demand=demand)),
    ):
        error = await error_of(call)
        assert (error.reason, error.subject) == ("ARGUMENT_INVALID", {"field": "blocks"})
    twice = [one, wire.block_list("attention", [2], 1)]
    chunk = pb.Publication(handoff_id="i", blocks=twice)
    error = await error_of(stub.Publish(pb.PublishRequest(engine=ref, publication=chunk)))
    assert (error.reason, error.subject["group"]) == ("PAGES_INVALID", "attention")
    assert not running.hub.directory.ledger.live
    await both.hand_over("j")


async def turns_during(work: Coroutine[Any, Any, None]) -> int:
    """Return how often other tasks have their turn while some work is done."""
    turns = 0
    task = asyncio.create_task(work)
    while not task.done():
        await asyncio.sleep(0)
        turns += 1
    await task
    return turns


async def test_others_have_their_turn_while_a_large_batch_is_taken(
    running: RunningBroker, both: Pair
) -> None:
    hub = running.hub
    p = hub.directory.members.engines[EngineKey("default", "p")]
    outbox: EngineOutbox = Outbox(pb.SessionResponse, 10**6)
    batch = [pb.EngineMessage(message_id=1)] * 5 * MAX_AT_ONCE
    hear = partial(SessionWords(hub).hear, p, outbox)
    stand = Stand.of(hub.standing)
    assert await turns_during(hear_batch(batch, outbox, hear, hub.now_s, stand)) > 5
    answer = await outbox.take()
    assert answer is not None
    assert {one.refused.reason for one in answer.events} == {"ARGUMENT_INVALID"}
    late = link.AgentMessage(settled=link.Settled(handoff=1))
    orders: AgentOutbox = Outbox(link.ConnectResponse, 10**6)
    listen = partial(AgentLinkService(hub)._hear, p, p.agents[0])
    taken = hear_batch([late] * 5 * MAX_AT_ONCE, orders, listen, hub.now_s, stand)
    assert await turns_during(taken) > 5
    await both.hand_over("next")


async def test_others_have_their_turn_between_demands_by_prefix(running: RunningBroker) -> None:
    # Looking up one demand may take as long as the event loop may be kept busy.
    async with pair(running.address):
        hub = running.hub
        d = hub.directory.members.engines[EngineKey("default", "d")]
        outbox: EngineOutbox = Outbox(pb.SessionResponse, 10**6)
        asked = chain_of(range(16)).prefix(16)
        demand = pb.Demand(prefix=prefix_to_proto(asked), position_tokens=16)
        batch = [pb.EngineMessage(message_id=number, request=demand) for number in range(1, 21)]
        for number, message in enumerate(batch):
            message.request.handoff_id = f"d-{number}"
        hear = partial(SessionWords(hub).hear, d, outbox)
        stand = Stand.of(hub.standing)
        assert (
            await turns_during(hear_batch(batch, outbox, hear, hub.now_s, stand)) > len(batch) // 2
        )
