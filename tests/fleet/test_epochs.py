"""Agents and engines take nothing of an epoch that is over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from agent_harness.fake_broker import FakeBroker
from agent_harness.waiting import until
from broker.fakes import P_BLOCKS, POSITION, model_layout
from restow.agents.link.broker_link import Link
from restow.broker.client import EngineSession
from restow.broker.client.connection.brokers import EpochOverError, Epochs
from restow.broker.client.connection.channel import Credentials
from restow.v1 import agent_link_pb2 as link
from restow.v1 import broker_pb2 as pb
from restow.v1 import broker_pb2_grpc


def test_a_lower_epoch_is_not_taken_and_another_fleet_begins_anew() -> None:
    epochs = Epochs()
    epochs.opened("one")
    for epoch in (3, 3, 7):
        epochs.take(epoch)
    with pytest.raises(EpochOverError, match="epoch 6, and the fleet is in epoch 7"):
        epochs.take(6)
    epochs.opened("one")
    with pytest.raises(EpochOverError):
        epochs.take(6)
    epochs.opened("another")
    epochs.take(6)


class _Listener:
    """Counts welcomes and orders."""

    def __init__(self) -> None:
        self.welcomes = 0
        self.orders: list[int] = []

    async def hello(self) -> link.Hello:
        return link.Hello(engine=pb.EngineRef(engine_id="E", incarnation="1"))

    def welcomed(self, broker_epoch: str) -> None:
        self.welcomes += 1

    def take(self, order: link.AgentOrder) -> None:
        self.orders.append(order.unstage.handoff)


def unstage(number: int) -> link.AgentOrder:
    return link.AgentOrder(unstage=link.Unstage(handoff=number))


async def test_an_agent_does_nothing_that_a_broker_of_an_epoch_that_is_over_orders(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def breaks() -> int:
        """Return how often a stream broke for EPOCH_OVER.

        `Link.refusal` is soon that of the next broker.
        """
        return sum("reason='EPOCH_OVER'" in one.getMessage() for one in caplog.records)

    async with (
        FakeBroker(fleet="f", pool_epoch=7) as new,
        FakeBroker(fleet="f", pool_epoch=5) as old,
    ):
        listener = _Listener()
        agent = Link(f"{new.address},{old.address}", listener, Credentials())
        await agent.start(20.0)
        (await new.agent("E", 0)).send(unstage(1))
        await until(lambda: listener.orders == [1])
        await new.stop()
        await until(lambda: breaks() > 0)
        assert (listener.welcomes, listener.orders) == (1, [1])
        old.pool_epoch = 8
        await until(lambda: listener.welcomes == 2)
        stream = await old.agent("E", 0)
        stream.send(unstage(2))
        await until(lambda: listener.orders == [1, 2])
        old.pool_epoch = 6  # in the middle of a stream
        before = breaks()
        stream.send(unstage(3))
        await until(lambda: breaks() > before)
        assert listener.orders == [1, 2]
        await agent.close()


class _FakeSessions(broker_pb2_grpc.BrokerServicer):
    """Lets engines in, and ends the first publication that is said on a stream as DONE."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.streams = 0

    async def RegisterEngine(
        self, request: pb.RegisterEngineRequest, context: Any
    ) -> pb.RegisterEngineResponse:
        return pb.RegisterEngineResponse(layout_digest="d")

    async def UnregisterEngine(
        self, request: pb.UnregisterEngineRequest, context: Any
    ) -> pb.UnregisterEngineResponse:
        return pb.UnregisterEngineResponse()

    async def Session(
        self, request_iterator: AsyncIterator[pb.SessionRequest], context: Any
    ) -> AsyncIterator[pb.SessionResponse]:
        self.streams += 1
        opened = pb.EngineEvent(opened=pb.SessionOpened(broker_epoch="b", fleet="f"))
        yield pb.SessionResponse(events=[opened], epoch=self.epoch)
        async for request in request_iterator:
            for message in request.messages:
                ended = pb.Ended(handoff_id=message.publish.handoff_id, state=pb.HANDOFF_STATE_DONE)
                yield pb.SessionResponse(events=[pb.EngineEvent(ended=ended)], epoch=self.epoch)


@asynccontextmanager
async def sessions(epoch: int) -> AsyncIterator[tuple[_FakeSessions, str, grpc.aio.Server]]:
    server, fake = grpc.aio.server(), _FakeSessions(epoch)  # type: ignore[abstract]
    broker_pb2_grpc.add_BrokerServicer_to_server(fake, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield fake, f"127.0.0.1:{port}", server
    finally:
        await server.stop(0)


async def test_an_engine_believes_no_end_of_an_epoch_that_is_over() -> None:
    async with (
        sessions(7) as (_, first, server),
        sessions(5) as (old, second, _),
        EngineSession("E", "1", model_layout(), f"{first},{second}") as session,
    ):
        assert (await session.publish("h0", P_BLOCKS, POSITION)).done
        await server.stop(0)
        published = session.publish("h1", P_BLOCKS, POSITION)
        await until(lambda: old.streams >= 3)
        assert not published.done()
        old.epoch = 8
        assert (await asyncio.wait_for(published, 20.0)).done
