"""An engine's session for threads, whose event loop runs on its own thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from typing import Self, TypeVar

from restow.broker.client.connection.channel import Credentials
from restow.broker.client.connection.errors import SessionClosedError
from restow.broker.client.connection.loop_thread import LoopThread
from restow.broker.client.engine.chains import Holders, Offer, Prefix, PrefixChain
from restow.broker.client.engine.commands import StateOrder
from restow.broker.client.engine.engine_messages import EngineWords
from restow.broker.client.engine.handoff_futures import Delivery, HandoffEnded
from restow.broker.client.engine.prefix_side import Change
from restow.broker.client.engine.session import EngineSession
from restow.broker.errors import RestowError
from restow.broker.layout import Layout
from restow.v1 import broker_pb2 as pb

T = TypeVar("T")


class BlockingDelivery(Future[HandoffEnded]):
    """Tells threads how a demand ends, as `Delivery` does on a loop.

    ``result(timeout)`` waits for the `HandoffEnded`. ``cancel`` gives the demand up; then
    ``result`` raises `CancelledError`, and the pages are D's again once `pages_free` is done
    without an error.
    """

    def __init__(self, give_up: Callable[[], object]) -> None:
        """Call ``give_up`` on the caller's thread when it is cancelled. Sessions create it."""
        super().__init__()
        self.pages_free: Future[None] = Future()
        """Done when no rank writes to D's pages any more.

        Raises `PagesNotFreeError` if a closed session cannot tell.
        """
        self.sampled: Future[int] = Future()
        """The token that P sampled, for a demand that takes it, told before the end.

        Raises `CancelledError` if the end comes without it.
        """
        self._give_up = give_up
        self.set_running_or_notify_cancel()

    def cancel(self) -> bool:
        """Give the demand up, and return True; return False if it has ended."""
        if self.done():
            return False
        self._give_up()
        return True


def _closed() -> SessionClosedError:
    return SessionClosedError("the session was not started, or was closed")


def _copy(source: asyncio.Future[T], target: Future[T]) -> None:
    """Copy the result of a loop's future to a thread's future."""
    if source.cancelled():
        target.set_exception(CancelledError())
        return
    error = source.exception()
    if error is None:
        target.set_result(source.result())
    else:
        target.set_exception(error)


class BlockingSession(EngineWords[Future[HandoffEnded], BlockingDelivery]):
    """An `EngineSession` for code without ``await``, on its own thread; a context manager.

    Its methods may be called from any thread; futures are `concurrent.futures.Future`. Messages of
    one thread reach the broker in order. If the session is not started or is closed, all methods
    but `start` and `close` raise `SessionClosedError`; `cancel` and `take_back` do nothing then.
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
        """Prepare like `EngineSession`; callbacks are called on the session's thread."""
        super().__init__(block_counts)
        self._name = f"restow-{engine_id}"
        self._session = EngineSession(
            engine_id,
            incarnation,
            layout,
            broker,
            credentials,
            on_lost,
            publishes=publishes,
            asks=asks,
            digests=digests,
            on_offer=on_offer,
            on_keep=on_keep,
            on_drain=on_drain,
            on_forget=on_forget,
            on_command=on_command,
        )
        self._thread: LoopThread | None = None

    @property
    def is_open(self) -> bool:
        """Whether the broker knows the engine and receives its messages now."""
        return self._session.is_open

    def start(self, timeout_s: float = 10.0) -> None:
        """Register the layout and open the stream, within ``timeout_s``.

        Raises like `EngineSession.start`; then the session is closed.
        """
        self._thread = LoopThread(self._name, _closed)
        try:
            self._thread.run(self._session.start(timeout_s))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Unregister and end the thread, as `EngineSession.close`. May be called again."""
        thread, self._thread = self._thread, None
        if thread is not None:
            try:
                thread.run(self._session.close())
            finally:
                thread.close()

    def __enter__(self) -> Self:
        """Connect the session."""
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Unregister and close the session."""
        self.close()

    def cancel(self, handoff_id: str, detail: str = "") -> None:
        """Give handoff ``handoff_id`` up, as `EngineSession.cancel`; ``detail`` says why."""
        if self._thread is not None:
            self._thread.call_soon(self._session.cancel, handoff_id, detail)

    def take_back(self, handoff_id: str, detail: str = "") -> None:
        """Take back the published chunks of ``handoff_id``, as `EngineSession.take_back`."""
        if self._thread is not None:
            self._thread.call_soon(self._session.take_back, handoff_id, detail)

    def find(
        self, chains: Sequence[PrefixChain], *, limit: int = 8, timeout_s: float = 1.0
    ) -> Future[Holders]:
        """Ask who holds how much of each of ``chains``, as `EngineSession.find`; returns a future.

        It names at most ``limit`` holders for each, and raises after ``timeout_s``.
        """
        session = self._session
        return self._open_thread().start(session.find(chains, limit=limit, timeout_s=timeout_s))

    def drain(self, timeout_s: float | None = None) -> bool:
        """Take part in nothing new, and wait up to ``timeout_s`` for open handoffs to end.

        Returns as `EngineSession.drain`.
        """
        return self._open_thread().run(self._session.drain(timeout_s))

    # -- inside -----------------------------------------------------------------------------------

    def _publish(self, message: pb.EngineMessage, hold_ms: int) -> Future[HandoffEnded]:
        future = Future[HandoffEnded]()

        def begin() -> None:
            # In one step, so that messages of one thread reach the session in order.
            if not future.set_running_or_notify_cancel():
                return
            try:
                said = self._session._publish(message, hold_ms)
            except RestowError as error:
                future.set_exception(error)
            else:
                said.add_done_callback(lambda end: _copy(end, future))

        self._open_thread().call_soon(begin)
        return future

    def _say(self, message: pb.EngineMessage) -> None:
        self._open_thread().call_soon(self._session._say, message)

    def _revise(self, revision: str) -> None:
        self._open_thread().call_soon(self._session.set_revision, revision)

    def _tell(self, change: Change) -> None:
        self._open_thread().call_soon(self._session._tell, change)

    def _ask(self, handoff_id: str, message: pb.EngineMessage) -> BlockingDelivery:
        thread = self._open_thread()
        asked: list[Delivery] = []

        def give_up() -> None:
            for asked_delivery in asked:
                asked_delivery.cancel()

        delivery = BlockingDelivery(lambda: thread.call_soon(give_up))

        def begin() -> None:
            asked_delivery = self._session._ask(handoff_id, message)
            asked.append(asked_delivery)
            asked_delivery.sampled.add_done_callback(lambda told: _copy(told, delivery.sampled))
            asked_delivery.add_done_callback(lambda ended: _copy(ended, delivery))
            asked_delivery.pages_free.add_done_callback(
                lambda freed: _copy(freed, delivery.pages_free)
            )

        thread.call_soon(begin)
        return delivery

    def _open_thread(self) -> LoopThread:
        if self._thread is None:
            raise _closed()
        return self._thread
