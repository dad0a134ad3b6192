"""The agent's stream to the broker: Hello, orders, answers, and again after each break."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import grpc
import structlog

from restow.agents.link.kept_stream import KeptStream
from restow.broker.client.credentials import Credentials
from restow.broker.errors import RestowError
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


_Stream = KeptStream[pb.AgentMessage, pb.ConnectRequest, pb.ConnectResponse]


class Link:
    """The stream, in the broker's words. Belongs to one event loop."""

    def __init__(
        self, broker: str, listener: Listener, credentials: Credentials | None = None
    ) -> None:
        """Prepare; `start` connects. ``credentials`` None: those of the environment."""
        self._listener = listener
        self._stream: _Stream = KeptStream(
            broker, self, "restow.agent", credentials or Credentials.of()
        )
        self._log = structlog.get_logger("restow.agent").bind(broker=broker)

    @property
    def refusal(self) -> RestowError | None:
        """Why the broker does not know the agent, as far as it has said."""
        return self._stream.refusal

    def begin(self) -> None:
        """Connect, without waiting."""
        self._stream.begin()

    async def start(self, timeout_s: float) -> None:
        """Connect, and wait for the welcome. Raises like `KeptStream.start`."""
        await self._stream.start(timeout_s)

    def send(self, message: pb.AgentMessage) -> None:
        """Queue an answer; it is lost if the stream breaks before it is written."""
        self._stream.send(message)

    def give_up(self, refusal: RestowError) -> None:
        """Leave the broker for good."""
        self._stream.give_up(refusal)

    async def close(self) -> None:
        """End the stream. May be repeated."""
        await self._stream.close()

    # -- what the stream asks ---------------------------------------------------------------------

    def call(
        self, channel: grpc.aio.Channel
    ) -> grpc.aio.StreamStreamCall[pb.ConnectRequest, pb.ConnectResponse]:
        """Begin the call."""
        return agent_link_pb2_grpc.AgentLinkStub(channel).Connect()

    async def opening(self) -> pb.ConnectRequest:
        """Hello."""
        hello = await self._listener.hello()
        return pb.ConnectRequest(messages=[pb.AgentMessage(hello=hello)])

    def batch(self, messages: Sequence[pb.AgentMessage]) -> pb.ConnectRequest:
        """A batch of answers."""
        return pb.ConnectRequest(messages=messages)

    def hear(self, response: pb.ConnectResponse, stream: _Stream) -> None:
        """Hand on the orders that come after the welcome."""
        for order in response.orders:
            if order.WhichOneof("body") == "welcome":
                stream.opened()
                self._listener.welcomed(order.welcome.broker_epoch)
            elif stream.is_open:
                self._listener.take(order)
            else:
                self._log.warning("order before the welcome", order=order.WhichOneof("body"))
