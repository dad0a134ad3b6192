"""An engine's session: its stream to the broker, which is opened again whenever it breaks."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Self

import grpc

from restow.broker.client.connection.brokers import EpochOverError, Epochs
from restow.broker.client.connection.channel import OWN_PROCESS, Credentials, broker_address
from restow.broker.client.connection.errors import (
    MAY_PASS,
    BrokerUnreachableError,
    OtherServerError,
    decoded,
    end_task,
    from_rpc_error,
    is_cancelled,
)
from restow.broker.client.connection.kept_stream import KeptStream
from restow.broker.client.engine.chains import (
    Holders,
    Offer,
    Prefix,
    PrefixChain,
    find_request,
    holders_of,
)
from restow.broker.client.engine.commands import StateOrder
from restow.broker.client.engine.engine_messages import EngineWords
from restow.broker.client.engine.handoff_futures import Delivery, HandoffEnded
from restow.broker.client.engine.open_handoffs import OpenHandoffs
from restow.broker.client.engine.prefix_side import Change, PrefixSide
from restow.broker.errors import NoLeaderError, NotLeaderError, RestowError
from restow.broker.layout import Layout
from restow.broker.rpc import wire
from restow.broker.rpc.sizes import check_size
from restow.broker.trust.errors import TrustError
from restow.broker.versions import own_version
from restow.v1 import broker_pb2 as pb
from restow.v1 import broker_pb2_grpc

REGISTER_S = 20.0
UNREGISTER_TIMEOUT_S = 1.0
LOOK_EVERY_S = 0.25
"""Interval of checking leases and patience."""
MAY_COME = (BrokerUnreachableError.reason, NotLeaderError.reason, NoLeaderError.reason)
"""Refusals after which `EngineSession.start` retries until its time is over."""
LIFTED = frozenset({*MAY_PASS, "UNAUTHENTICATED", "PERMISSION_DENIED"})
"""Statuses of refusals that may pass, or that an operator may lift, for a registered engine."""
NUMBER_BITS = 48
"""Bits of the random number after which a session numbers its messages."""
CLOSE_S = 1.0
"""Time for which a closing session waits for the ends of its demands."""
MAX_BATCH = 128
"""Messages in a batch: few enough that the broker handles a batch while the next is written."""


class SessionStream(KeptStream[pb.EngineMessage, pb.SessionRequest, pb.SessionResponse]):
    """Registers an engine, and keeps its stream open; each stream begins by repeating everything.

    The engine is registered again before each stream, because a broker that restarted has forgotten
    it.
    """

    max_batch = MAX_BATCH

    def __init__(
        self,
        address: str,
        credentials: Credentials,
        message: pb.RegisterEngineRequest,
        everything: Callable[[], Iterable[pb.EngineMessage]],
        heard: Callable[[pb.EngineEvent], None],
        on_lost: Callable[[RestowError], None],
    ) -> None:
        """Prepare; `start` registers with ``message``. Events go to ``heard``."""
        super().__init__(address, "restow.client", credentials)
        self.message = message
        self.layout_digest = ""
        """The layout's digest from the broker; empty before the first registration."""
        self._everything, self._heard, self._on_lost = everything, heard, on_lost
        self._registered = False
        """Whether the broker has registered the engine since the last stream broke."""
        self._epochs = Epochs()
        self._log = self._log.bind(engine=message.engine.engine_id)

    async def prepare(self) -> None:
        """Register with the broker. Raises its refusal, and `MessageTooLargeError`."""
        self._registered = False
        check_size("the layout", self.message.ByteSize())
        stub = broker_pb2_grpc.BrokerStub(await self.channel.channel())
        response = await stub.RegisterEngine(
            self.message, timeout=REGISTER_S, metadata=self.brokers.metadata
        )
        if not decoded(response, self.brokers.current).layout_digest:
            words = "it registered an engine without a layout"
            raise OtherServerError("UNKNOWN", self.brokers.current, words)
        self._registered, self.layout_digest = True, response.layout_digest

    def call(
        self, channel: grpc.aio.Channel
    ) -> grpc.aio.StreamStreamCall[pb.SessionRequest, pb.SessionResponse]:
        """Begin the call."""
        return broker_pb2_grpc.BrokerStub(channel).Session()

    async def opening(self) -> pb.SessionRequest:
        """Return the request that names the engine."""
        return pb.SessionRequest(engine=self.message.engine, epoch=self._epochs.highest)

    def batch(self, messages: Sequence[pb.EngineMessage]) -> pb.SessionRequest:
        """Return a batch of the engine's messages."""
        return pb.SessionRequest(messages=messages)

    def hear(self, response: pb.SessionResponse) -> None:
        """Repeat everything on the welcome, and pass on later events. Raises `EpochOverError`."""
        if not self.is_open and response.events:
            self._epochs.opened(response.events[0].opened.fleet)
        self._epochs.take(response.epoch)
        for event in response.events:
            if event.WhichOneof("body") == "opened" and not self.is_open:
                self.opened()
                for message in self._everything():
                    self.send(message)
            else:
                self._heard(event)

    def is_final(self, refusal: RestowError, patient: bool) -> bool:
        """Return whether retrying is useless: another life has the engine, or it is refused."""
        if refusal.reason == "ENGINE_REPLACED" or type(refusal) is RestowError:  # a fault here
            return True
        if self._registered:
            return False
        if not self.was_open:
            return refusal.reason not in MAY_COME
        # Only a broker's own refusal is final: a gateway or another server may answer for a while.
        lifted = isinstance(refusal, TrustError | OtherServerError | EpochOverError)
        return not (lifted or refusal.status in LIFTED)

    def late(self, timeout_s: float) -> RestowError:
        """Return the error of a broker that has opened no stream within ``timeout_s``."""
        if not self._registered:
            return super().late(timeout_s)
        return self._unreached(f"it opened no session within {timeout_s:g} s")

    def lost(self, refusal: RestowError) -> None:
        """End the session."""
        self._on_lost(refusal)

    async def find(self, chains: Sequence[PrefixChain], limit: int, timeout_s: float) -> Holders:
        """Ask who holds prefixes of the engine's model.

        Raises `ChainFormError`, `ChainInvalidError`, and the broker's refusal.
        """
        request = find_request(chains, self.message.engine.engine_id, None, limit)
        stub = broker_pb2_grpc.BrokerStub(self.channel.present or await self.channel.channel())
        try:
            return holders_of(await stub.Find(request, timeout=timeout_s))
        except grpc.aio.AioRpcError as error:
            secure = self._credentials.secure
            raise from_rpc_error(error, self.brokers.current, secure) from None
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            # The channel was closed because another broker is tried.
            raise self._unreached("the connection was closed to try another broker") from None

    async def leave(self) -> None:
        """Unregister the engine."""
        if self.channel.present is not None and self.layout_digest:
            stub = broker_pb2_grpc.BrokerStub(self.channel.present)
            request = pb.UnregisterEngineRequest(engine=self.message.engine)
            with contextlib.suppress(grpc.aio.AioRpcError, TrustError):
                await stub.UnregisterEngine(request, timeout=UNREGISTER_TIMEOUT_S)


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
        digests: bool = False,
        on_offer: Callable[[Offer], None] | None = None,
        on_keep: Callable[[Prefix], None] | None = None,
        on_drain: Callable[[], Sequence[Prefix]] | None = None,
        on_forget: Callable[[str], None] | None = None,
        on_command: Callable[[StateOrder], None] | None = None,
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
        are made and costs measured before its first handoff; it may do both in any case. With
        ``digests`` the content of each of its handoffs is compared, whatever the broker's settings.

        ``on_offer`` is called when an engine asks for a state that this engine holds; the engine
        then publishes the state or declines, at once or later. With None all offers are declined.
        ``on_keep`` makes the engine a store, and is called with states that others hold and that
        are worth keeping. ``on_drain`` returns the engine's own states worth keeping when it is to
        leave, the most valuable first; they are handed over to a store. ``on_forget`` tells a store
        to drop the states of a revision, and ``on_command`` gives it a command, which it answers
        with `answer_command`. All are called on the loop.

        Raises a `TrustError` of the credentials, and `AddressInvalidError`.
        """
        super().__init__(block_counts)
        self.address = broker_address(broker)
        self.ref = pb.EngineRef(engine_id=engine_id, incarnation=incarnation)
        """This run of the engine, as calls outside of the session name it."""
        message = pb.RegisterEngineRequest(
            engine=self.ref,
            layout=wire.layout_to_proto(layout),
            version=own_version(),
            publishes=publishes,
            asks=asks,
            digests=digests,
            keeps=on_keep is not None,
        )
        self._stream = SessionStream(
            *(self.address, credentials or Credentials.of(), message),
            *(self._everything, self._hear, self._lose),
        )
        # No message may match an end meant for an earlier process of this incarnation.
        self._handoffs = OpenHandoffs(self._send, first_number=secrets.randbits(NUMBER_BITS))
        hears = (on_offer, on_keep, on_drain, on_forget, on_command)
        self._prefixes = PrefixSide(engine_id, self._send, self.find, *hears)
        self._busy = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self._draining = False
        self._on_lost = on_lost

    @property
    def layout_digest(self) -> str:
        """The layout's SHA-256 from the broker; empty before the registration."""
        return self._stream.layout_digest

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
        return self._stream.is_open

    async def start(self, timeout_s: float = 10.0) -> None:
        """Register the layout and open the stream, within ``timeout_s``.

        Raises `BrokerCallError` if the broker refuses, `MessageTooLargeError` for a layout that no
        broker accepts, `BrokerUnreachableError` after the timeout, and a `TrustError` for unusable
        files; then the session is closed. Like all methods it raises `ForkedError` in a process
        that was forked later.
        """
        OWN_PROCESS.check()
        try:
            await self._stream.start(timeout_s)
        except BaseException:
            await self.close()
            raise
        self._keeper = asyncio.create_task(self._keep_time())

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
            if self._keeper is not None:
                await end_task(self._keeper)
            await self._prefixes.close()
        finally:
            await self._stream.close()
            self._handoffs.cancel_all("SESSION_CLOSED", "the session is closed")

    async def _give_up_demands(self) -> None:
        demands = self._handoffs.demands
        if not self._stream.is_open or not demands:
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
        return await self._stream.find(chains, limit, timeout_s)

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
        self._stream.message.revision = self._handoffs.revision = revision
        self._prefixes.revise(revision)
        self._send(pb.EngineMessage(revise=pb.Revise(revision=revision)))

    def _tell(self, change: Change) -> None:
        self._prefixes.held.tell(change)

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
        yield from self._prefixes.held.everything()
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

    def _lose(self, error: RestowError) -> None:
        """End the session for good."""
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
            connected = self._stream.is_open
            if connected:
                self._handoffs.renew()
            self._handoffs.give_up_late(connected)
