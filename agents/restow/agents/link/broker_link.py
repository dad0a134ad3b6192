"""An agent's stream to the broker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import grpc

from restow.broker.client.connection.brokers import Epochs
from restow.broker.client.connection.channel import Credentials
from restow.broker.client.connection.kept_stream import KeptStream
from restow.v1 import agent_link_pb2 as pb
from restow.v1 import agent_link_pb2_grpc


class Listener(Protocol):
    """Receives what comes on the stream. All methods run on the link's event loop."""

    async def hello(self) -> pb.Hello:
        """Return the introduction, once no order of an earlier stream is under way any more."""

    def welcomed(self, broker_epoch: str) -> None:
        """Note that a new stream is open; orders of earlier streams no longer count."""

    def take(self, order: pb.AgentOrder) -> None:
        """Carry out an order of the present stream."""


class Link(KeptStream[pb.AgentMessage, pb.ConnectRequest, pb.ConnectResponse]):
    """An agent's stream to the broker. Belongs to one event loop."""

    def __init__(
        self, broker: str, listener: Listener, credentials: Credentials | None = None
    ) -> None:
        """Prepare; `start` connects. ``credentials`` None means those of the environment."""
        super().__init__(broker, "restow.agent", credentials or Credentials.of())
        self._listener = listener
        self._epochs = Epochs()

    def call(
        self, channel: grpc.aio.Channel
    ) -> grpc.aio.StreamStreamCall[pb.ConnectRequest, pb.ConnectResponse]:
        """Begin the call."""
        return agent_link_pb2_grpc.AgentLinkStub(channel).Connect(metadata=self.brokers.metadata)

    async def opening(self) -> pb.ConnectRequest:
        """Return a batch with Hello."""
        hello = await self._listener.hello()
        hello.epoch = self._epochs.highest
        return pb.ConnectRequest(messages=[pb.AgentMessage(hello=hello)])

    def batch(self, messages: Sequence[pb.AgentMessage]) -> pb.ConnectRequest:
        """Return a batch of answers."""
        return pb.ConnectRequest(messages=messages)

    def hear(self, response: pb.ConnectResponse) -> None:
        """Pass on the orders that come after the welcome. Raises `EpochOverError`."""
        if not self.is_open and response.orders:
            self._epochs.opened(response.orders[0].welcome.fleet)
        self._epochs.take(response.epoch)
        for order in response.orders:
            if order.WhichOneof("body") == "welcome":
                self.opened()
                self._listener.welcomed(order.welcome.broker_epoch)
            elif self.is_open:
                self._listener.take(order)
            else:
                self._log.warning("order before the welcome", order=order.WhichOneof("body"))
