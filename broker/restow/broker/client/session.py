"""An engine's session: publish, request, and learn how handoffs end."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import grpc
import structlog

from restow.broker import wire
from restow.broker.client.channel import broker_address, open_channel
from restow.broker.client.errors import BrokerCallError, BrokerUnreachableError, from_rpc_error
from restow.broker.errors import RestowError
from restow.broker.layout import Layout
from restow.v1 import broker_pb2 as pb
from restow.v1 import broker_pb2_grpc

FIRST_BACKOFF_S = 0.1
LAST_BACKOFF_S = 5.0
MAX_BATCH = 512
RENEWALS_PER_LEASE = 3

Blocks = Mapping[str, Iterable[int]]


@dataclass(frozen=True, slots=True)
class HandoffEnded:
    """How a handoff ended. D may use its pages only if ``done``; P's pages are free either way."""

    handoff_id: str
    state: str
    reason: str
    detail: str
    bytes: int
    transfer_us: int

    @property
    def done(self) -> bool:
        """Whether D holds the state, whole."""
        return self.state == "DONE"


@dataclass(slots=True)
class _Open:
    """What has been said of a live handoff, to be said again after a reconnect."""

    messages: list[pb.EngineMessage]
    end: asyncio.Future[HandoffEnded]
    lease_ms: int = 0
    renew_at_s: float = 0.0


class EngineSession:
    """One engine's registration and its stream, kept alive over broker restarts.

    All methods belong to one event loop; `restow.broker.client.BlockingSession` serves threads.
    """

    def __init__(
        self, engine_id: str, incarnation: str, layout: Layout, broker: str | None = None
    ) -> None:
        """Prepare; `start` or ``async with`` connects."""
        self.address = broker_address(broker)
        self._ref = pb.EngineRef(engine_id=engine_id, incarnation=incarnation)
        self._layout = layout
        self._outbox: deque[pb.EngineMessage] = deque()
        self._wake = asyncio.Event()
        self._opened = asyncio.Event()
        self._open: dict[str, _Open] = {}
        self._by_message: dict[int, str] = {}
        self._last_message = 0
        self._runner: asyncio.Task[None] | None = None
        self._renewer: asyncio.Task[None] | None = None
        self._channel: grpc.aio.Channel | None = None
        self._log = structlog.get_logger("restow.client").bind(engine=engine_id)
        self.layout_digest = ""

    async def __aenter__(self) -> Self:
        """Connect."""
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Unregister and close."""
        await self.close()

    async def start(self, timeout_s: float = 10.0) -> None:
        """Register the layout and open the stream.

        Raises `BrokerCallError` for a refused layout, `BrokerUnreachableError` after the timeout.
        """
        self._channel = open_channel(self.address)
        stub = broker_pb2_grpc.BrokerStub(self._channel)
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                await self._register(stub, max(0.1, deadline_s - time.monotonic()))
                break
            except BrokerUnreachableError:
                if time.monotonic() > deadline_s:
                    raise
                await asyncio.sleep(FIRST_BACKOFF_S)
        self._runner = asyncio.create_task(self._run(stub))
        self._renewer = asyncio.create_task(self._renew_leases())
        await asyncio.wait_for(self._opened.wait(), timeout_s)

    async def close(self) -> None:
        """Unregister; handoffs that have not ended end as CANCELLED here."""
        for task in (self._runner, self._renewer):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        if self._channel is not None:
            with contextlib.suppress(grpc.aio.AioRpcError):
                stub = broker_pb2_grpc.BrokerStub(self._channel)
                await stub.UnregisterEngine(
                    pb.UnregisterEngineRequest(engine=self._ref), timeout=1.0
                )
            await self._channel.close()
        for handoff_id in list(self._open):
            self._finish(
                HandoffEnded(handoff_id, "CANCELLED", "SESSION_CLOSED", "session closed", 0, 0)
            )

    def publish(
        self,
        handoff_id: str,
        blocks: Blocks,
        position_tokens: int,
        *,
        final: bool = True,
        first_blocks: Mapping[str, int] | None = None,
        lease_ms: int = 30_000,
    ) -> asyncio.Future[HandoffEnded]:
        """Publish blocks of a handoff; the future tells when P's pages are free again.

        The lease is renewed for as long as the session lives. Raises a `PagesError` for ids that
        are no int32. The future raises `BrokerCallError` if the broker refuses the message.
        """
        firsts = first_blocks or {}
        publication = pb.Publication(
            handoff_id=handoff_id,
            blocks=[wire.block_list(g, ids, firsts.get(g, 0)) for g, ids in blocks.items()],
            position_tokens=position_tokens,
            final=final,
            lease_ms=lease_ms,
        )
        known = self._say(handoff_id, pb.EngineMessage(publish=publication))
        known.lease_ms = lease_ms
        known.renew_at_s = time.monotonic() + lease_ms / 1000 / RENEWALS_PER_LEASE
        return known.end

    def request(
        self, handoff_id: str, blocks: Blocks, *, held_tokens: int = 0, timeout_ms: int = 30_000
    ) -> asyncio.Future[HandoffEnded]:
        """Ask for a handoff's state; the future tells how it ended.

        Raises like `publish`.
        """
        demand = pb.Demand(
            handoff_id=handoff_id,
            blocks=wire.block_lists(blocks),
            held_tokens=held_tokens,
            timeout_ms=timeout_ms,
        )
        return self._say(handoff_id, pb.EngineMessage(request=demand)).end

    def cancel(self, handoff_id: str, detail: str = "") -> None:
        """Give a handoff up; its future tells when it has ended."""
        cancellation = pb.Cancellation(handoff_id=handoff_id, detail=detail)
        if handoff_id in self._open:
            self._send(pb.EngineMessage(cancel=cancellation), handoff_id)

    # -- inside -----------------------------------------------------------------------------------

    def _say(self, handoff_id: str, message: pb.EngineMessage) -> _Open:
        known = self._open.get(handoff_id)
        if known is None:
            future: asyncio.Future[HandoffEnded] = asyncio.get_running_loop().create_future()
            # A caller may not care for the end: then a refusal is no unhandled error.
            future.add_done_callback(lambda done: done.cancelled() or done.exception())
            known = self._open[handoff_id] = _Open([], future)
        known.messages.append(message)
        self._send(message, handoff_id)
        return known

    def _send(self, message: pb.EngineMessage, handoff_id: str) -> None:
        self._last_message += 1
        message.message_id = self._last_message
        self._by_message[message.message_id] = handoff_id
        self._outbox.append(message)
        self._wake.set()

    async def _register(self, stub: broker_pb2_grpc.BrokerAsyncStub, timeout_s: float) -> None:
        request = pb.RegisterEngineRequest(
            engine=self._ref, layout=wire.layout_to_proto(self._layout)
        )
        try:
            response = await stub.RegisterEngine(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, self.address) from None
        self.layout_digest = response.layout_digest

    async def _run(self, stub: broker_pb2_grpc.BrokerAsyncStub) -> None:
        """Keep a stream open: register and say everything again after each break."""
        backoff_s = FIRST_BACKOFF_S
        while True:
            try:
                await self._stream(stub)
            except grpc.aio.AioRpcError as error:
                typed = from_rpc_error(error, self.address)
                if typed.reason == "ENGINE_REPLACED":
                    self._fail_all(typed)
                    return
                self._log.warning("session broke", reason=typed.reason, detail=typed.message)
            if self._opened.is_set():
                backoff_s = FIRST_BACKOFF_S
            self._opened.clear()
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.5))  # noqa: S311
            backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)
            try:
                await self._register(stub, LAST_BACKOFF_S)
            except BrokerUnreachableError:
                continue
            except RestowError as error:
                self._fail_all(error)
                return
            self._outbox.clear()
            for handoff_id, known in list(self._open.items()):
                for message in known.messages:
                    self._send(message, handoff_id)

    async def _stream(self, stub: broker_pb2_grpc.BrokerAsyncStub) -> None:
        call = stub.Session()
        await call.write(pb.SessionRequest(engine=self._ref))
        writer = asyncio.create_task(self._write(call))
        try:
            async for response in call:
                for event in response.events:
                    self._hear(event)
        finally:
            writer.cancel()
            call.cancel()

    async def _write(
        self, call: grpc.aio.StreamStreamCall[pb.SessionRequest, pb.SessionResponse]
    ) -> None:
        await self._opened.wait()
        while True:
            while not self._outbox:
                self._wake.clear()
                await self._wake.wait()
            count = min(len(self._outbox), MAX_BATCH)
            batch = [self._outbox.popleft() for _ in range(count)]
            await call.write(pb.SessionRequest(messages=batch))

    def _hear(self, event: pb.EngineEvent) -> None:
        body = event.WhichOneof("body")
        if body == "ended":
            ended = event.ended
            self._finish(
                HandoffEnded(
                    ended.handoff_id,
                    pb.HandoffState.Name(ended.state).removeprefix("HANDOFF_STATE_"),
                    ended.reason,
                    ended.detail,
                    ended.bytes,
                    ended.transfer_us,
                )
            )
        elif body == "refused":
            self._refused(event.refused)
        elif body == "opened":
            self._opened.set()

    def _refused(self, refused: pb.Refused) -> None:
        handoff_id = self._by_message.pop(refused.message_id, refused.handoff_id)
        known = self._open.get(handoff_id)
        if known is None:
            return
        known.messages = [m for m in known.messages if m.message_id != refused.message_id]
        error = BrokerCallError(
            refused.status, refused.reason, refused.detail, handoff=refused.handoff_id
        )
        if not known.messages:
            del self._open[handoff_id]
            if not known.end.done():
                known.end.set_exception(error)
        else:
            self._log.warning("message refused", handoff=handoff_id, reason=refused.reason)

    def _finish(self, ended: HandoffEnded) -> None:
        known = self._open.pop(ended.handoff_id, None)
        if known is None:
            return
        for message in known.messages:
            self._by_message.pop(message.message_id, None)
        if not known.end.done():
            known.end.set_result(ended)

    def _fail_all(self, error: RestowError) -> None:
        for known in self._open.values():
            if not known.end.done():
                known.end.set_exception(error)
        self._open.clear()

    async def _renew_leases(self) -> None:
        while True:
            await asyncio.sleep(0.25)
            now_s = time.monotonic()
            for handoff_id, known in list(self._open.items()):
                if known.lease_ms and now_s >= known.renew_at_s:
                    known.renew_at_s = now_s + known.lease_ms / 1000 / RENEWALS_PER_LEASE
                    renewal = pb.Renewal(handoff_id=handoff_id, lease_ms=known.lease_ms)
                    self._outbox.append(pb.EngineMessage(renew=renewal))
                    self._wake.set()
