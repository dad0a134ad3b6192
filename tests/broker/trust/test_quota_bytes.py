"""A tenant's bytes on a real broker: refused with a reason, counted while they are on their way."""

from __future__ import annotations

import asyncio
import gc
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from agent_harness.waiting import until
from broker.fakes import FakeAgent, broker, engine, model_layout, pair
from broker.guarded import reason_of
from restow.broker.client import BrokerCallError, EngineSession
from restow.broker.client.connection.channel import open_channel
from restow.broker.client.connection.errors import from_rpc_error
from restow.broker.core.engines.account import Account, Total
from restow.broker.errors import QueueFullError, RestowError
from restow.broker.layout import check_layout
from restow.broker.rpc import wire
from restow.broker.rpc.wire import bytes_as_values
from restow.broker.server.base.outbox import COPIES, MESSAGE_BYTES, Outbox
from restow.broker.server.serve import RunningBroker
from restow.v1 import agent_link_pb2, broker_pb2_grpc
from restow.v1 import broker_pb2 as pb

MIB = 1 << 20
WAIT_S = 20.0
FREE_BYTES = 1 << 16


def account(running: RunningBroker) -> Account:
    return running.hub.directory.ledger.tenants.account("default")


async def test_what_is_published_beyond_the_quota_is_refused() -> None:
    async with broker(tenant_max_bytes=2 * MIB) as running, pair(running.address) as both:
        blocks = {"attention": range(64), "state": [4]}
        said = [both.p.publish(f"h{number}", blocks, 0, final=False) for number in range(1000)]
        with pytest.raises(BrokerCallError, match="more exceed its quota of 2097152") as caught:
            await said[-1]
        told = caught.value
        assert (told.status, told.reason) == ("RESOURCE_EXHAUSTED", "QUOTA_EXCEEDED")
        assert account(running).size_bytes <= 2 * MIB
        # The engine is there as before, and may go on when something has ended.
        for number in range(1000):
            both.p.cancel(f"h{number}")
        ends = await asyncio.gather(*said, return_exceptions=True)
        kept = sum(not isinstance(one, BaseException) for one in ends)
        assert 200 < kept < 500
        await both.hand_over("next")


async def test_an_engine_and_its_agents_come_back_though_the_quota_is_used_up() -> None:
    async with broker(tenant_max_bytes=2 * MIB) as running, pair(running.address) as both:
        blocks = {"attention": range(64), "state": [4]}
        said = [both.p.publish(f"h{number}", blocks, 0, final=False) for number in range(1000)]
        with pytest.raises(BrokerCallError):
            await said[-1]
        await both.p._stream.prepare()
        for fake in both.p_agents:
            again = FakeAgent(both.p, model_layout(2), fake.hello.rank, 64)
            again.hello.CopyFrom(fake.hello)
            await fake.drop()
            await again.connect()
            await again.drop()


async def test_agents_beyond_the_quota_are_not_let_in() -> None:
    async with (
        broker(tenant_max_bytes=MIB) as running,
        engine(running.address, "e", 4, agents=False) as (session, _),
    ):
        fakes = [FakeAgent(session, model_layout(4), rank, 64) for rank in range(4)]
        for fake in fakes:
            fake.hello.nixl_metadata = bytes(MIB * 2 // 5)
        for fake in fakes[:2]:
            await fake.connect()
        assert await reason_of(fakes[2].connect()) == "QUOTA_EXCEEDED"
        await fakes[0].drop()
        await fakes[0]._channel.close()
        fakes[0].hello.nixl_metadata = b"small"
        again = FakeAgent(session, model_layout(4), 0, 64)
        await again.connect()
        for fake in (*fakes[1:], again):
            await fake.drop()


async def test_agents_that_wait_for_their_engine_are_counted() -> None:
    async with broker(tenant_max_bytes=MIB) as running:
        session = EngineSession("late", "1", model_layout(4), running.address)
        fakes = [FakeAgent(session, model_layout(4), rank, 64) for rank in range(4)]
        for fake in fakes:
            fake.hello.nixl_metadata = bytes(MIB // 5)
        first = [asyncio.create_task(fake.connect()) for fake in fakes[:2]]
        await until(lambda: running.hub.expected.waiting == 2)
        assert await reason_of(fakes[2].connect()) == "QUOTA_EXCEEDED"
        await session.start()
        await asyncio.gather(*first)
        for fake in fakes:
            await fake.drop()
        await session.close()


async def test_layouts_beyond_the_quota_are_refused_before_they_are_made() -> None:
    size_bytes = bytes_as_values(wire.layout_to_proto(model_layout(8)))
    async with broker(tenant_max_bytes=size_bytes - 1) as running:
        session = EngineSession("large", "1", model_layout(8), running.address)
        with patch.object(wire, "layout_from_proto", side_effect=AssertionError):
            assert await reason_of(session.start()) == "QUOTA_EXCEEDED"
        async with engine(running.address, "small"):
            assert 0 < account(running).kept_bytes < size_bytes


def test_what_a_layout_takes_is_told_from_its_message() -> None:
    layout = model_layout(4)
    check_layout(layout)
    size_bytes = bytes_as_values(wire.layout_to_proto(layout))
    twice = bytes_as_values(wire.layout_to_proto(model_layout(8)))
    assert 1000 * 4 < size_bytes < twice < 2.1 * size_bytes


async def test_calls_that_wait_are_counted_with_their_messages() -> None:
    async with (
        broker(tenant_max_bytes=MIB) as running,
        engine(running.address, "d") as (d, _),
        open_channel(running.address) as channel,
    ):
        stub = broker_pb2_grpc.BrokerStub(channel)
        calls: list[Any] = []
        for number in range(500):
            ids = np.arange(8 * number, 8 * number + 8, dtype="<i4").tobytes()
            blocks = [pb.BlockList(group="attention", block_ids=ids)]
            demand = pb.Demand(handoff_id=f"h{number}", blocks=blocks, timeout_ms=60_000)
            calls.append(stub.Request(pb.RequestRequest(engine=d.ref, demand=demand)))
        waiting = [asyncio.ensure_future(one) for one in calls]
        done, _ = await asyncio.wait(waiting, timeout=WAIT_S, return_when=asyncio.FIRST_EXCEPTION)
        error = from_rpc_error(next(iter(done)).exception(), "broker")
        assert error.reason == "QUOTA_EXCEEDED"
        assert account(running).size_bytes <= MIB
        for call in calls:
            call.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await until(lambda: not account(running).passing_bytes)


def hellos_of(incarnation: str) -> int:
    """Return how many first messages of this life's agents are in memory."""
    return sum(
        type(one) is agent_link_pb2.ConnectRequest
        and any(message.hello.engine.incarnation == incarnation for message in one.messages)
        for one in gc.get_objects()
    )


async def test_a_stream_and_a_refused_one_keep_nothing_of_their_last_message() -> None:
    async with (
        broker(tenant_max_bytes=4 * MIB) as running,
        engine(running.address, "e", 2, agents=False) as (session, _),
    ):
        fakes = [FakeAgent(session, model_layout(2), rank, 64) for rank in range(2)]
        await fakes[0].connect()
        fakes[1].hello.nixl_metadata = bytes(7 * MIB)
        with pytest.raises(RestowError):
            await fakes[1].connect()
        await until(lambda: not hellos_of(session.ref.incarnation))
        for fake in fakes:
            await fake.drop()


# -- what waits for a stream ----------------------------------------------------------------------


def an_account(limit_bytes: int) -> Account:
    return Account("t", limit_bytes, Total(1 << 40))


async def test_what_others_can_do_without_is_not_added_where_it_would_cost_the_stream() -> None:
    own = an_account(MIB)
    outbox: Outbox[list[int]] = Outbox(list, 10_000, account=own, free_bytes=FREE_BYTES)
    assert outbox.has_room(MIB // 4)
    own.keep(MIB)
    assert not outbox.has_room(MIB // 4)
    assert outbox.has_room(100), "what is free for each stream is there all the same"
    outbox.open(MIB // 4).append(1)
    assert outbox.closed


async def test_what_waits_for_a_stream_is_carried_until_it_was_sent() -> None:
    own = an_account(MIB)
    outbox: Outbox[list[int]] = Outbox(list, 10_000, account=own, free_bytes=FREE_BYTES)
    outbox.open(100_000).append(1)
    assert own.passing_bytes == MESSAGE_BYTES + COPIES * 100_000 - FREE_BYTES
    assert await outbox.take() == [1]
    assert own.passing_bytes == MESSAGE_BYTES + COPIES * 100_000 - FREE_BYTES
    outbox.open(10).append(2)
    await outbox.take()
    assert own.passing_bytes == 0
    outbox.open(30_000).append(3)
    assert own.passing_bytes == 2 * MESSAGE_BYTES + COPIES * 30_010 - FREE_BYTES
    outbox.drop()
    assert own.passing_bytes == 0
    outbox.open(10).append(4)
    assert await outbox.take() is None
    assert own.passing_bytes == 0


async def test_a_reader_that_lets_more_wait_than_its_tenant_may_loses_its_stream() -> None:
    own = an_account(MIB)
    lost: list[bool] = []
    outbox: Outbox[list[int]] = Outbox(list, 10**6, lambda: lost.append(True), own)
    outbox.open(1000).append(1)
    await outbox.take()
    for number in range(1000):
        outbox.open(1000).append(number)
    assert lost == [True]
    with pytest.raises(QueueFullError):
        await outbox.take()
    assert own.passing_bytes == 0
