"""An engine's stream: what it says in batches, and what it hears."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

import grpc

from restow.broker.client.connection.backoff import Backoff
from restow.broker.client.connection.cancellation import begun
from restow.broker.client.connection.epochs import Epochs
from restow.broker.client.connection.errors import decoded
from restow.broker.rpc.sizes import take_batch
from restow.v1 import broker_pb2 as pb
from restow.v1 import broker_pb2_grpc

MAX_BATCH = 128
"""Messages in a batch: few enough that the broker works on one while the next is written."""


class Stream:
    """One stream after the other, each of which begins by saying everything again. On one loop."""

    def __init__(
        self,
        engine: pb.EngineRef,
        everything: Callable[[], Iterable[pb.EngineMessage]],
        hear: Callable[[pb.EngineEvent], None],
    ) -> None:
        """Have none. ``everything`` is what is said first, ``hear`` hears what the broker says."""
        self.opened = asyncio.Event()
        """Whether the broker knows the engine, and hears it."""
        self._engine, self._everything, self._hear = engine, everything, hear
        self._epochs = Epochs()
        self._outbox: deque[pb.EngineMessage] = deque()
        self._wake = asyncio.Event()

    def send(self, message: pb.EngineMessage) -> bool:
        """Say it; False: no stream is open."""
        if self.opened.is_set():
            self._outbox.append(message)
            self._wake.set()
        return self.opened.is_set()

    async def opens(self, runner: asyncio.Task[None], timeout_s: float) -> bool:
        """Wait until one has opened; False: not in time, or ``runner`` has ended."""
        opened = asyncio.create_task(self.opened.wait())
        await asyncio.wait({opened, runner}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        return not opened.cancel()

    async def run(
        self, stub: broker_pb2_grpc.BrokerAsyncStub, address: str, backoff: Backoff
    ) -> None:
        """Open a stream to ``address``, until it ends.

        Raises `grpc.aio.AioRpcError`, a `TrustError`, `OtherServerError` and `EpochOverError`.
        """
        call = stub.Session()
        writer: asyncio.Task[None] | None = None
        try:
            await call.write(pb.SessionRequest(engine=self._engine))
            await begun(call)
            async for answer in call:
                response = decoded(answer, address)
                if writer is None and response.events:
                    self._epochs.opened(response.events[0].opened.fleet)
                self._epochs.take(response.epoch)
                for event in response.events:
                    if event.WhichOneof("body") == "opened" and writer is None:
                        self._outbox = deque(self._everything())
                        self.opened.set()
                        backoff.began()
                        writer = asyncio.create_task(self._write(call))
                    else:
                        self._hear(event)
        finally:
            self.opened.clear()
            call.cancel()
            if writer is not None:
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)

    async def _write(
        self, call: grpc.aio.StreamStreamCall[pb.SessionRequest, pb.SessionResponse]
    ) -> None:
        while True:
            while not self._outbox:
                self._wake.clear()
                await self._wake.wait()
            batch = take_batch(self._outbox, MAX_BATCH)
            await call.write(pb.SessionRequest(messages=batch))
