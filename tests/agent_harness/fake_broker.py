"""A broker whose lines the test speaks: it holds the agents' streams, and decides nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Self

import grpc

from agent_harness.waiting import WAIT_S
from restow.broker.errors import RestowError
from restow.broker.rpc.status import ErrorInterceptor
from restow.broker.server.serve import SERVER_OPTIONS
from restow.v1 import agent_link_pb2 as pb
from restow.v1 import agent_link_pb2_grpc


class AgentStream:
    """One agent's stream."""

    def __init__(self, hello: pb.Hello) -> None:
        self.hello = hello
        self.outbox: asyncio.Queue[list[pb.AgentOrder] | None] = asyncio.Queue()
        self._heard: asyncio.Queue[pb.AgentMessage] = asyncio.Queue()
        self.over = asyncio.Event()

    def send(self, *orders: pb.AgentOrder) -> None:
        self.outbox.put_nowait(list(orders))

    def end(self) -> None:
        """End the stream from the broker's side."""
        self.outbox.put_nowait(None)

    def hear(self, message: pb.AgentMessage) -> None:
        self._heard.put_nowait(message)

    @property
    def silent(self) -> bool:
        return self._heard.empty()

    async def next(self) -> Any:
        """Return the body of the next message."""
        message = await asyncio.wait_for(self._heard.get(), WAIT_S)
        return getattr(message, str(message.WhichOneof("body")))


class FakeBroker(agent_link_pb2_grpc.AgentLinkServicer):
    """Serves AgentLink on a port; ``refusal`` is raised instead of a welcome.

    The first streams break with what gRPC says of ``breaks``.
    """

    def __init__(
        self,
        epoch: str = "epoch-1",
        address: str = "127.0.0.1:0",
        fleet: str = "",
        pool_epoch: int = 0,
    ) -> None:
        self.epoch = epoch
        self.fleet, self.pool_epoch = fleet, pool_epoch
        self.address = address
        self.refusal: RestowError | None = None
        self.refusals = 0
        self.breaks: list[grpc.StatusCode] = []
        self.streams: dict[tuple[str, int], AgentStream] = {}
        self._changed = asyncio.Event()
        self._server: grpc.aio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[ErrorInterceptor()])
        agent_link_pb2_grpc.add_AgentLinkServicer_to_server(self, self._server)
        port = self._server.add_insecure_port(self.address)
        self.address = f"127.0.0.1:{port}"
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    async def agent(self, engine_id: str, rank: int) -> AgentStream:
        """Return the rank's stream as soon as its agent has opened it."""
        async with asyncio.timeout(WAIT_S):
            while (stream := self.streams.get((engine_id, rank))) is None:
                self._changed.clear()
                await self._changed.wait()
        return stream

    async def Connect(
        self,
        request_iterator: AsyncIterator[pb.ConnectRequest],
        context: grpc.aio.ServicerContext[pb.ConnectRequest, pb.ConnectResponse],
    ) -> AsyncIterator[pb.ConnectResponse]:
        first = await anext(request_iterator)
        if self.breaks:
            await context.abort(self.breaks.pop(0))
        if self.refusal is not None:
            self.refusals += 1
            raise self.refusal
        hello = first.messages[0].hello
        welcome = pb.Welcome(broker_epoch=self.epoch, fleet=self.fleet)
        first_order = pb.AgentOrder(welcome=welcome)
        yield pb.ConnectResponse(orders=[first_order], epoch=self.pool_epoch)
        stream = self.streams[hello.engine.engine_id, hello.rank] = AgentStream(hello)
        self._changed.set()
        listening = asyncio.create_task(_listen(stream, request_iterator))
        try:
            while (orders := await stream.outbox.get()) is not None:
                yield pb.ConnectResponse(orders=orders, epoch=self.pool_epoch)
        finally:
            listening.cancel()
            stream.over.set()


async def _listen(stream: AgentStream, requests: AsyncIterator[pb.ConnectRequest]) -> None:
    async for request in requests:
        for message in request.messages:
            stream.hear(message)
