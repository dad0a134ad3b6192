"""An engine's session: its stream to the broker, which is opened again whenever it breaks."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Self

import grpc

from restow.broker.client.connection.brokers import (
    FIRST_S,
    Backoff,
    Brokers,
    EpochOverError,
    Epochs,
)
from restow.broker.client.connection.channel import OWN_PROCESS, Credentials, broker_address
from restow.broker.client.connection.diagnosis import explained_soon
from restow.broker.client.connection.errors import (
    BrokerUnreachableError,
    OtherServerError,
    begun,
    decoded,
    end_task,
)
from restow.broker.client.engine.chains import Holders, Offer, Prefix, PrefixChain
from restow.broker.client.engine.delivery import Delivery, HandoffEnded
from restow.broker.client.engine.engine_words import EngineWords
from restow.broker.client.engine.open_handoffs import OpenHandoffs
from restow.broker.client.engine.prefix_side import Change, PrefixSide
from restow.broker.client.engine.registration import Registration
from restow.broker.errors import NoLeaderError, NotLeaderError, RestowError
from restow.broker.layout import Layout
from restow.broker.logs import get_logger
from restow.broker.rpc.sizes import take_batch
from restow.broker.trust.errors import TrustError
from restow.v1 import broker_pb2 as pb
from restow.v1 import broker_pb2_grpc

MAX_BATCH = 128
"""Messages in a batch: few enough that the broker handles one while the next is written."""


class Stream:
    """Opens one stream after another; each begins by repeating everything. On one loop."""

    def __init__(
        self,
        engine: pb.EngineRef,
        everything: Callable[[], Iterable[pb.EngineMessage]],
        hear: Callable[[pb.EngineEvent], None],
    ) -> None:
        """Prepare; a stream begins with ``everything``, and ``hear`` gets the broker's events."""
        self.opened = asyncio.Event()
        """Set while the broker knows the engine and receives its messages."""
        self._engine, self._everything, self._hear = engine, everything, hear
        self._epochs = Epochs()
        self._outbox: deque[pb.EngineMessage] = deque()
        self._wake = asyncio.Event()

    def send(self, message: pb.EngineMessage) -> bool:
        """Send a message; return False if no stream is open."""
        if self.opened.is_set():
            self._outbox.append(message)
            self._wake.set()
        return self.opened.is_set()

    async def opens(self, runner: asyncio.Task[None], timeout_s: float) -> bool:
        """Wait for a stream to open; return False if time runs out or ``runner`` ends."""
        opened = asyncio.create_task(self.opened.wait())
        await asyncio.wait({opened, runner}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        return not opened.cancel()

    async def run(
        self, stub: broker_pb2_grpc.BrokerAsyncStub, address: str, backoff: Backoff
    ) -> None:
        """Open a stream to ``address``, and serve it until it ends.

        Raises `grpc.aio.AioRpcError`, a `TrustError`, `OtherServerError` and `EpochOverError`.
        """
        call = stub.Session()
        writer: asyncio.Task[None] | None = None
        try:
            await call.write(pb.SessionRequest(engine=self._engine, epoch=self._epochs.highest))
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


LOOK_EVERY_S = 0.25
"""Interval of checking leases and patience."""
ASK_OTHERS = (BrokerUnreachableError.reason, NotLeaderError.reason)
"""Ends of a stream after which another broker is tried first, if there is one."""
MAY_COME = (BrokerUnreachableError.reason, NotLeaderError.reason, NoLeaderError.reason)
"""Refusals after which `EngineSession.start` retries until its time is over."""
NUMBER_BITS = 48
"""Bits of the random number after which a session numbers its messages."""
CLOSE_S = 1.0
"""Time for which a closing session waits for the ends of its demands."""


class EngineSession(EngineWords[asyncio.Future[HandoffEnded], Delivery]):
    """Registers an engine, and keeps its stream open across broker restarts; a context manager.

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
        block_counts: Mapping[str, int] | None = None,
        *,
        publishes: bool = False,
        asks: bool = False,
        on_offer: Callable[[Offer], None] | None = None,
        on_keep: Callable[[Prefix], None] | None = None,
        on_drain: Callable[[], Sequence[Prefix]] | None = None,
        on_forget: Callable[[str], None] | None = None,
    ) -> None:
        """Prepare; `start` or ``async with`` connects.

        ``engine_id`` is the engine's unique name. ``incarnation`` is a new random word at each
        start of the engine, and is given to its agents too. ``layout`` is that of all its ranks.
        ``broker`` is HOST:PORT or any address that gRPC accepts, or several with commas; None means
        RESTOW_BROKER or the default. ``credentials`` None means those of the environment.

        ``on_lost`` is called on the loop with the reason why the session has ended for good, unless
        it was closed. ``block_counts`` is the engine's number of blocks by group; ids at or above
        it are refused at the call. For groups without a count the broker refuses them, because it
        knows the agents' memory. If an engine says that it ``publishes`` (P) or ``asks`` (D), plans
        are made and costs measured before its first handoff; it may do both in any case.

        ``on_offer`` is called when an engine asks for a state that this engine holds; the engine
        then publishes the state or declines, at once or later. With None all offers are declined.
        ``on_keep`` makes the engine a store, and is called with states that others hold and that
        are worth keeping. ``on_drain`` returns the engine's own states worth keeping when it is to
        leave, the most valuable first; they are handed over to a store. ``on_forget`` tells a store
        to drop the states of a revision. All are called on the loop.

        Raises a `TrustError` of the credentials, and `AddressInvalidError`.
        """
        super().__init__(block_counts)
        self.address = broker_address(broker)
        self._credentials = credentials or Credentials.of()
        self.ref = pb.EngineRef(engine_id=engine_id, incarnation=incarnation)
        """This run of the engine, as calls outside of the session name it."""
        self._brokers = Brokers(self.address)
        self._registration = Registration(
            self._brokers,
            self._credentials,
            self.ref,
            layout,
            publishes=publishes,
            asks=asks,
            keeps=on_keep is not None,
        )
        # No message may match an end meant for an earlier process of this incarnation.
        self._handoffs = OpenHandoffs(self._send, first_number=secrets.randbits(NUMBER_BITS))
        hears = (on_offer, on_keep, on_drain, on_forget)
        self._prefixes = PrefixSide(engine_id, self._send, self.find, *hears)
        self._stream = Stream(self.ref, self._everything, self._hear)
        self._busy = asyncio.Event()
        self._backoff = Backoff()
        self._runner: asyncio.Task[None] | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._draining = False
        self._on_lost = on_lost
        self._lost: RestowError | None = None
        self._log = get_logger("restow.client").bind(engine=engine_id)

    @property
    def layout_digest(self) -> str:
        """The layout's SHA-256 from the broker; empty before the registration."""
        return self._registration.layout_digest

    async def __aenter__(self) -> Self:
        """Connect the session."""
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Unregister and close the session."""
        await self.close()

    @property
    def is_open(self) -> bool:
        """Whether the broker knows the engine and receives its messages now. Thread-safe."""
        return self._stream.opened.is_set()

    async def start(self, timeout_s: float = 10.0) -> None:
        """Register the layout and open the stream, within ``timeout_s``.

        Raises `BrokerCallError` if the broker refuses, `MessageTooLargeError` for a layout that no
        broker accepts, `BrokerUnreachableError` after the timeout, and a `TrustError` for unusable
        files; then the session is closed. Like all methods it raises `ForkedError` in a process
        that was forked later.
        """
        OWN_PROCESS.check()
        deadline_s = time.monotonic() + timeout_s
        try:
            while True:
                try:
                    await self._registration.say(max(0.1, deadline_s - time.monotonic()))
                    break
                except RestowError as error:
                    if error.reason not in MAY_COME:
                        raise
                    if time.monotonic() > deadline_s:
                        asked = self._brokers.current
                        raise await explained_soon(error, asked, self._credentials) from None
                    if not self._brokers.failed():
                        await asyncio.sleep(FIRST_S)
            self._runner = asyncio.create_task(self._run())
            self._runner.add_done_callback(self._ran)
            self._keeper = asyncio.create_task(self._keep_time())
            left_s = max(0.1, deadline_s - time.monotonic())
            if not await self._stream.opens(self._runner, left_s):
                raise self._lost or BrokerUnreachableError(
                    f"the broker at {self.address} opened no session within {left_s:.1f} s",
                    broker=self.address,
                )
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Unregister; open handoffs end as CANCELLED here.

        Demands are given up, and their ends awaited for up to ``CLOSE_S``. The pages of a demand
        that has not ended by then are D's again when the engine's agents are closed, and its
        delivery says so. P's pages may be read until the engine's agents are gone: stop the agents
        first.
        """
        OWN_PROCESS.check()
        try:
            await self._give_up_demands()
            for task in (self._runner, self._keeper):
                if task is not None:
                    await end_task(task)
            await self._prefixes.close()
        finally:
            await self._registration.close()
            self._handoffs.cancel_all("SESSION_CLOSED", "the session is closed")

    async def _give_up_demands(self) -> None:
        demands = self._handoffs.demands
        if not self._stream.opened.is_set() or not demands:
            return
        for handoff_id, _ in demands:
            self.cancel(handoff_id, "the session is closed")
        await asyncio.wait([delivery.pages_free for _, delivery in demands], timeout=CLOSE_S)

    def cancel(self, handoff_id: str, detail: str = "") -> None:
        """Give handoff ``handoff_id`` up; its future tells when it has ended.

        ``detail`` gives the reason to the other side and to operators. If nothing was published,
        the broker and the agents forget fences of the id. The session does not publish the id
        again. Does nothing for a publication that has ended.
        """
        OWN_PROCESS.check()
        self._handoffs.cancel(handoff_id, detail)

    def take_back(self, handoff_id: str, detail: str = "") -> None:
        """Take back the published chunks of ``handoff_id``, whose pages are in other use now.

        For a P that preempts a prompt. Publish the whole handoff again from block 0; D then reads
        all of it. A complete publication is given up as by `cancel`, and ``detail`` gives the
        reason. Does nothing if the handoff has ended.
        """
        OWN_PROCESS.check()
        self._handoffs.take_back(handoff_id, detail)

    async def find(
        self, chains: Sequence[PrefixChain], *, limit: int = 8, timeout_s: float = 1.0
    ) -> Holders:
        """Return who of the tenant holds how much of each of ``chains``, for this engine's model.

        Holders of most tokens come first, at most ``limit``. Raises `BrokerCallError`,
        `BrokerUnreachableError` after ``timeout_s``, `ChainFormError` and `ChainInvalidError`.
        """
        OWN_PROCESS.check()
        if self._revision:
            chains = [replace(chain, revision=chain.revision or self._revision) for chain in chains]
        return await self._registration.find(chains, limit, timeout_s)

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Take part in nothing new, and wait up to ``timeout_s`` for open handoffs; None: for ever.

        Later publications and demands are refused (`BrokerCallError`, ENGINE_DRAINING), unless the
        other side named the handoff before. What ``on_drain`` returns is first handed over to a
        store. Returns whether all handoffs have ended; then `close` loses nothing.
        """
        self._draining = True
        self._send(pb.EngineMessage(drain=pb.Drain()))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(self._prefixes.begin_hand_over())
                await self._handoffs.wait_ended()
        return self._handoffs.empty

    # -- inside -----------------------------------------------------------------------------------

    def _publish(self, message: pb.EngineMessage, hold_ms: int) -> asyncio.Future[HandoffEnded]:
        return self._handoffs.publish(message, hold_ms)

    def _say(self, message: pb.EngineMessage) -> None:
        self._send(message)

    def _revise(self, revision: str) -> None:
        self._registration.message.revision = self._handoffs.revision = revision
        self._prefixes.revise(revision)
        self._send(pb.EngineMessage(revise=pb.Revise(revision=revision)))

    def _tell(self, change: Change) -> None:
        self._prefixes.tell(change)

    def _ask(self, handoff_id: str, message: pb.EngineMessage) -> Delivery:
        return self._handoffs.ask(handoff_id, message)

    def _send(self, message: pb.EngineMessage) -> bool:
        # Without a stream the message is not lost: open handoffs are repeated on the next stream.
        self._busy.set()
        return self._stream.send(message)

    def _everything(self) -> Iterator[pb.EngineMessage]:
        if self._revision:  # may differ from the revision of the last registration
            yield pb.EngineMessage(revise=pb.Revise(revision=self._revision))
        yield from self._handoffs.everything()
        yield from self._prefixes.everything()
        if self._draining:  # after the handoffs, which would be refused otherwise
            yield pb.EngineMessage(drain=pb.Drain())

    def _hear(self, event: pb.EngineEvent) -> None:
        body = event.WhichOneof("body")
        if body == "ended":
            self._handoffs.hear_end(event.ended)
        elif body == "refused":
            self._handoffs.refuse(event.refused)
        elif body == "sampled":
            self._handoffs.sampled(event.sampled)
        else:
            self._prefixes.hear(event)

    async def _run(self) -> None:
        """Keep a stream open: register and repeat everything after each break."""
        while True:
            moved = False
            try:
                if self._registration.is_taken:
                    stub = await self._registration.stub()
                    await self._stream.run(stub, self._brokers.current, self._backoff)
            except grpc.aio.AioRpcError as error:
                typed = self._registration.typed(error)
                self._log.warning("session broke", reason=typed.reason, detail=typed.message)
                if typed.reason == "ENGINE_REPLACED":
                    self._lose(typed)
                    return
                moved = self._brokers.refused(typed)
                if not moved and self._brokers.several and typed.reason in ASK_OTHERS:
                    moved = self._brokers.failed()
            except (EpochOverError, OtherServerError) as error:
                self._log.warning("session broke", reason=error.reason, detail=error.message)
                moved = self._brokers.failed()
            except TrustError as error:
                self._log.warning("session broke", reason=error.reason, detail=error.message)
            try:
                await self._registration.say_again(self._backoff, at_once=moved)
            except RestowError as error:
                self._log.error("registration refused", reason=error.reason, detail=error.message)
                self._lose(error)
                return

    def _ran(self, runner: asyncio.Task[None]) -> None:
        """End the session if its runner failed unexpectedly, so that no caller waits for ever."""
        if not runner.cancelled() and (fault := runner.exception()) is not None:
            self._lose(RestowError(f"the session broke: {fault!r}"))

    def _lose(self, error: RestowError) -> None:
        """End the session for good."""
        self._lost = error
        self._handoffs.close(error)
        if self._on_lost is not None:
            self._on_lost(error)

    async def _keep_time(self) -> None:
        """Renew leases, and give up what the broker does not end in time."""
        while True:
            if self._handoffs.empty:
                self._busy.clear()
                await self._busy.wait()
            await asyncio.sleep(LOOK_EVERY_S)
            connected = self._stream.opened.is_set()
            if connected:
                self._handoffs.renew()
            self._handoffs.give_up_late(connected)
