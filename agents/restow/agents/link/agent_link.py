"""The agent's stream to the broker: Hello, orders, answers, and again after each break."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import grpc

from restow.agents.link.kept_stream import KeptStream
from restow.broker.client.connection.credentials import Credentials
from restow.broker.client.connection.epochs import Epochs
from restow.v1 import agent_link_pb2 as pb
from restow.v1 import agent_link_pb2_grpc


class Listener(Protocol):
    """Who hears what comes on the stream. All methods run on the link's event loop."""

    async def hello(self) -> pb.Hello:
        """The introduction, once nothing of an earlier stream is at work any more."""

    def welcomed(self, broker_epoch: str) -> None:
        """A new stream is open; what was ordered on earlier ones counts no more."""

    def take(self, order: pb.AgentOrder) -> None:
        """An order of the present stream."""


class Link(KeptStream[pb.AgentMessage, pb.ConnectRequest, pb.ConnectResponse]):
    """The stream, in the broker's words. Belongs to one event loop."""

    def __init__(
        self, broker: str, listener: Listener, credentials: Credentials | None = None
    ) -> None:
        """Prepare; `start` connects. ``credentials`` None: those of the environment."""
        super().__init__(broker, "restow.agent", credentials or Credentials.of())
        self._listener = listener
        self._epochs = Epochs()

    def call(
        self, channel: grpc.aio.Channel
    ) -> grpc.aio.StreamStreamCall[pb.ConnectRequest, pb.ConnectResponse]:
        """Begin the call."""
        return agent_link_pb2_grpc.AgentLinkStub(channel).Connect(metadata=self.brokers.metadata)

    async def opening(self) -> pb.ConnectRequest:
        """Hello."""
        hello = await self._listener.hello()
        return pb.ConnectRequest(messages=[pb.AgentMessage(hello=hello)])

    def batch(self, messages: Sequence[pb.AgentMessage]) -> pb.ConnectRequest:
        """A batch of answers."""
        return pb.ConnectRequest(messages=messages)

    def hear(self, response: pb.ConnectResponse) -> None:
        """Hand on the orders that come after the welcome. Raises `EpochOverError`."""
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
