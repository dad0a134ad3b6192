"""An engine's session: publish, request, and learn how handoffs end."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Self

import grpc

from restow.broker.client.backoff import FIRST_S, Backoff
from restow.broker.client.channel import RenewedChannel, broker_address
from restow.broker.client.credentials import Credentials
from restow.broker.client.delivery import Delivery, HandoffEnded
from restow.broker.client.diagnosis import explained_soon
from restow.broker.client.errors import MAY_PASS, BrokerUnreachableError, from_rpc_error
from restow.broker.client.open_handoffs import OpenHandoffs
from restow.broker.client.own_process import OWN_PROCESS
from restow.broker.errors import RestowError
from restow.broker.layout import Layout
from restow.broker.logs import get_logger
from restow.broker.rpc import wire
from restow.broker.rpc.sizes import check_size, take_batch
from restow.broker.rpc.status import cut
from restow.broker.trust.errors import TrustError
from restow.broker.versions import own_version
from restow.v1 import broker_pb2 as pb
from restow.v1 import broker_pb2_grpc

REGISTER_S = 20.0
MAX_BATCH = 128
"""Messages in a batch: few enough that the broker works on one while the next is written."""
LOOK_EVERY_S = 0.25
"""How often leases and patience are looked at."""
CLOSE_S = 1.0
"""How long a session that is closed waits for the ends of its demands."""
UNREGISTER_TIMEOUT_S = 1.0
_MENDED = frozenset({*MAY_PASS, "UNAUTHENTICATED", "PERMISSION_DENIED"})

Blocks = Mapping[str, Iterable[int]]


class EngineSession:
    """One engine's registration and its stream, kept alive over broker restarts.

    All methods belong to one event loop; `restow.broker.client.BlockingSession` serves threads.
    """

    def __init__(
        self,
        engine_id: str,
        incarnation: str,
        layout: Layout,
        broker: str | None = None,
        credentials: Credentials | None = None,
        on_lost: Callable[[RestowError], None] | None = None,
    ) -> None:
        """Prepare; `start` or ``async with`` connects.

        ``credentials`` None: those of the environment. Raises a `TrustError` of theirs, and
        `AddressInvalidError`. ``on_lost`` hears why the session has ended for good, if it was not
        closed: it belongs to the loop.
        """
        self.address = broker_address(broker)
        self._credentials = credentials or Credentials.of()
        self._channel = RenewedChannel(self.address, self._credentials)
        self.ref = pb.EngineRef(engine_id=engine_id, incarnation=incarnation)
        """This life of the engine, as calls beside the session name it."""
        self._registration = pb.RegisterEngineRequest(
            engine=self.ref, layout=wire.layout_to_proto(layout), version=own_version()
        )
        self._handoffs = OpenHandoffs(self._send)
        self._outbox: deque[pb.EngineMessage] = deque()
        self._wake = asyncio.Event()
        self._opened = asyncio.Event()
        self._busy = asyncio.Event()
        self._backoff = Backoff()
        self._stub: broker_pb2_grpc.BrokerAsyncStub | None = None
        """Of the present channel."""
        self._runner: asyncio.Task[None] | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._draining = False
        self._on_lost = on_lost
        self._lost: RestowError | None = None
        self._log = get_logger("restow.client").bind(engine=engine_id)
        self.layout_digest = ""

    async def __aenter__(self) -> Self:
        """Connect."""
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Unregister and close."""
        await self.close()

    async def start(self, timeout_s: float = 10.0) -> None:
        """Register the layout and open the stream.

        Raises `BrokerCallError` if it is refused, `MessageTooLargeError` for a layout that no
        broker takes, `BrokerUnreachableError` after the timeout, and a `TrustError` for files that
        can't be used; then the session is closed. It and all other methods raise `ForkedError` in
        a process that was forked later.
        """
        OWN_PROCESS.check()
        deadline_s = time.monotonic() + timeout_s
        try:
            while True:
                try:
                    await self._register(max(0.1, deadline_s - time.monotonic()))
                    break
                except BrokerUnreachableError as error:
                    if time.monotonic() > deadline_s:
                        raise await explained_soon(error, self.address, self._credentials) from None
                    await asyncio.sleep(FIRST_S)
            self._runner = asyncio.create_task(self._run())
            self._runner.add_done_callback(self._ran)
            self._keeper = asyncio.create_task(self._keep_time())
            await self._wait_opened(self._runner, max(0.1, deadline_s - time.monotonic()))
        except BaseException:
            await self.close()
            raise

    async def _wait_opened(self, runner: asyncio.Task[None], timeout_s: float) -> None:
        opened = asyncio.create_task(self._opened.wait())
        await asyncio.wait({opened, runner}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        opened.cancel()
        if not self._opened.is_set():
            raise self._lost or BrokerUnreachableError(
                f"the broker at {self.address} opened no session within {timeout_s:.1f} s",
                broker=self.address,
            )

    async def close(self) -> None:
        """Unregister; handoffs that have not ended end as CANCELLED here.

        Demands are given up and waited for, ``CLOSE_S`` at most; the pages of one that has not
        ended by then are D's again when the engine's agents are closed, and its delivery says so.
        P's pages may be read until the engine's agents are gone: stop those first.
        """
        OWN_PROCESS.check()
        await self._give_up_demands()
        for task in (self._runner, self._keeper):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        stub, self._stub = self._stub, None
        if stub is not None and self.layout_digest:
            request = pb.UnregisterEngineRequest(engine=self.ref)
            with contextlib.suppress(grpc.aio.AioRpcError):
                await stub.UnregisterEngine(request, timeout=UNREGISTER_TIMEOUT_S)
        await self._channel.close()
        self._handoffs.cancel_all("SESSION_CLOSED", "the session is closed")

    async def _give_up_demands(self) -> None:
        demands = self._handoffs.demands
        if not self._opened.is_set() or not demands:
            return
        for handoff_id, _ in demands:
            self.cancel(handoff_id, "the session is closed")
        await asyncio.wait([one.pages_free for _, one in demands], timeout=CLOSE_S)

    def publish(
        self,
        handoff_id: str,
        blocks: Blocks,
        position_tokens: int,
        *,
        final: bool = True,
        first_blocks: Mapping[str, int] | None = None,
        lease_ms: int = 30_000,
        hold_ms: int = 300_000,
        trace_parent: str = "",
        content: bytes = b"",
    ) -> asyncio.Future[HandoffEnded]:
        """Publish blocks of a handoff; the future tells when P's pages are free again.

        ``content`` names the state's content (`restow.broker.client.content`): a D that asks for
        another is refused. Empty: not named.

        The session renews the lease for ``hold_ms``, then lets it run out: a D that never asks
        costs P's pages no longer than both together. ``trace_parent`` is the W3C trace context of
        the request, for a broker that traces. Raises a `PagesError` for ids that are no
        int32, `MessageTooLargeError` for more than one message carries (say it in chunks), and
        `HandoffConflictError` for an id that this session has published before. The
        future raises `BrokerCallError` if the broker refuses this message; futures of other calls
        for the handoff wait on.
        """
        OWN_PROCESS.check()
        firsts = first_blocks or {}
        publication = pb.Publication(
            handoff_id=handoff_id,
            blocks=[wire.block_list(g, ids, firsts.get(g, 0)) for g, ids in blocks.items()],
            position_tokens=position_tokens,
            final=final,
            lease_ms=lease_ms,
            trace_parent=trace_parent,
            content=content,
        )
        return self._handoffs.publish(publication, hold_ms)

    def request(
        self,
        handoff_id: str,
        blocks: Blocks,
        *,
        held_tokens: int = 0,
        position_tokens: int = 0,
        timeout_ms: int = 30_000,
        trace_parent: str = "",
        content: bytes = b"",
    ) -> Delivery:
        """Ask for a handoff's state; the delivery tells how it ended.

        It fails if the state stands elsewhere than at ``position_tokens``; 0: anywhere. ``content``
        names what D wants the state of, up to that position; P's must be the same, if P names any.
        Cancelling the delivery cancels the demand. The blocks are D's again when its `pages_free`
        is done, however the delivery ended. A broker that can't be reached is waited for no longer
        than ``timeout_ms``. Raises a `PagesError` for ids that are no int32, and
        `MessageTooLargeError` for more than one message carries.
        """
        OWN_PROCESS.check()
        demand = pb.Demand(
            handoff_id=handoff_id,
            blocks=wire.block_lists(blocks),
            held_tokens=held_tokens,
            position_tokens=position_tokens,
            timeout_ms=timeout_ms,
            trace_parent=trace_parent,
            content=content,
        )
        return self._handoffs.ask(handoff_id, pb.EngineMessage(request=demand))

    def decline(self, handoff_id: str, detail: str = "") -> Delivery:
        """Go on without a state, instead of asking for it: P's pages are free at once.

        P need not have published it. The delivery tells when the broker knows. Raises
        `MessageTooLargeError`.
        """
        OWN_PROCESS.check()
        declined = pb.Decline(handoff_id=handoff_id, detail=cut(detail))
        return self._handoffs.ask(handoff_id, pb.EngineMessage(decline=declined))

    def cancel(self, handoff_id: str, detail: str = "") -> None:
        """Give a handoff up; its future tells when it has ended."""
        OWN_PROCESS.check()
        self._handoffs.cancel(handoff_id, detail)

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Take part in nothing new, and wait for what is open to end: then `close` loses nothing.

        What is published or asked for from now on is refused (`BrokerCallError`, ENGINE_DRAINING),
        unless the other side spoke of it before. False: after ``timeout_s`` something is open.
        """
        self._draining = True
        self._send(pb.EngineMessage(drain=pb.Drain()))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._handoffs.wait_ended()
        return self._handoffs.empty

    # -- inside -----------------------------------------------------------------------------------

    def _send(self, message: pb.EngineMessage) -> bool:
        # While no stream is open the open handoffs have it all: they are said whole when one is.
        self._busy.set()
        if self._opened.is_set():
            self._outbox.append(message)
            self._wake.set()
        return self._opened.is_set()

    async def _register(self, timeout_s: float) -> None:
        check_size("the layout", self._registration.ByteSize())
        stub = self._stub = broker_pb2_grpc.BrokerStub(await self._channel.channel())
        try:
            response = await stub.RegisterEngine(self._registration, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise self._typed(error) from None
        self.layout_digest = response.layout_digest

    def _typed(self, error: grpc.aio.AioRpcError) -> RestowError:
        return from_rpc_error(error, self.address, self._credentials.secure)

    async def _run(self) -> None:
        """Keep a stream open: register and say everything again after each break."""
        while True:
            try:
                if self._stub is not None:
                    await self._stream(self._stub)
            except grpc.aio.AioRpcError as error:
                typed = self._typed(error)
                self._log.warning("session broke", reason=typed.reason, detail=typed.message)
                if typed.reason == "ENGINE_REPLACED":
                    self._lose(typed)
                    return
            finally:
                self._opened.clear()
            try:
                await self._register_again()
            except RestowError as error:
                self._log.error("registration refused", reason=error.reason, detail=error.message)
                self._lose(error)
                return

    async def _register_again(self) -> None:
        """Register as soon as the broker is there. Raises its refusal, if that is for good."""
        while True:
            await asyncio.sleep(self._backoff.wait_s())
            try:
                while not await self._channel.connects():
                    pass
                await self._register(REGISTER_S)
                return
            except BrokerUnreachableError:
                continue
            except RestowError as error:
                if not _may_be_mended(error):
                    raise
                self._log.warning("not let in", reason=error.reason, detail=error.message)

    def _ran(self, runner: asyncio.Task[None]) -> None:
        """Nobody must wait for a runner that broke on a fault of its own."""
        if not runner.cancelled() and (fault := runner.exception()) is not None:
            self._lose(RestowError(f"the session broke: {fault!r}"))

    def _lose(self, error: RestowError) -> None:
        """The session has ended for good."""
        self._lost = error
        self._handoffs.close(error)
        if self._on_lost is not None:
            self._on_lost(error)

    async def _stream(self, stub: broker_pb2_grpc.BrokerAsyncStub) -> None:
        call = stub.Session()
        await call.write(pb.SessionRequest(engine=self.ref))
        writer: asyncio.Task[None] | None = None
        try:
            async for response in call:
                for event in response.events:
                    body = event.WhichOneof("body")
                    if body == "ended":
                        self._handoffs.finish(HandoffEnded.of(event.ended), event.ended.demand)
                    elif body == "refused":
                        self._handoffs.refuse(event.refused)
                    elif body == "opened" and writer is None:
                        self._outbox = deque(self._handoffs.everything())
                        if self._draining:  # what was said before that is not refused
                            self._outbox.append(pb.EngineMessage(drain=pb.Drain()))
                        self._opened.set()
                        self._backoff.began()
                        writer = asyncio.create_task(self._write(call))
        finally:
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

    async def _keep_time(self) -> None:
        """Renew leases, and give up what the broker does not end in time."""
        while True:
            if self._handoffs.empty:
                self._busy.clear()
                await self._busy.wait()
            await asyncio.sleep(LOOK_EVERY_S)
            connected = self._opened.is_set()
            if connected:
                self._handoffs.renew()
            self._handoffs.give_up_late(connected)


def _may_be_mended(error: RestowError) -> bool:
    """Whether time or somebody may undo what an engine is refused for that was let in before."""
    # gRPC's own refusal of too large a message has its status as its reason.
    too_large = error.reason == "RESOURCE_EXHAUSTED"
    return isinstance(error, TrustError) or (error.status in _MENDED and not too_large)
