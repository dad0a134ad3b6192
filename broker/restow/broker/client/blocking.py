"""An engine's session for threads: the loop runs in a thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from functools import wraps
from typing import Concatenate, ParamSpec, Self, TypeVar

from restow.broker.client.credentials import Credentials
from restow.broker.client.delivery import Delivery, HandoffEnded
from restow.broker.client.loop_thread import LoopThread
from restow.broker.client.session import EngineSession
from restow.broker.errors import RestowError
from restow.broker.layout import Layout

P = ParamSpec("P")
T = TypeVar("T")


class BlockingDelivery(Future[HandoffEnded]):
    """`Delivery` for threads. ``cancel`` gives the demand up: ``result`` then raises
    `CancelledError`, and the pages are D's again when `pages_free` is done without an error.
    """

    def __init__(self, give_up: Callable[[], object]) -> None:
        """``give_up`` is called when it is cancelled, on the caller's thread."""
        super().__init__()
        self.pages_free: Future[None] = Future()
        self._give_up = give_up
        self.set_running_or_notify_cancel()

    def cancel(self) -> bool:
        """Give the demand up. False: it has ended."""
        if self.done():
            return False
        self._give_up()
        return True


def _closed() -> RuntimeError:
    return RuntimeError("the session is not started, or closed")


def _copy(source: asyncio.Future[T], target: Future[T]) -> None:
    """Give a thread's future what one of the loop's became."""
    if source.cancelled():
        target.set_exception(CancelledError())
        return
    error = source.exception()
    if error is None:
        target.set_result(source.result())
    else:
        target.set_exception(error)


def _said(
    say: Callable[Concatenate[EngineSession, P], asyncio.Future[HandoffEnded]],
) -> Callable[Concatenate[BlockingSession, P], Future[HandoffEnded]]:
    """The session's word, said on its loop."""

    @wraps(say)
    def call(self: BlockingSession, /, *words: P.args, **more: P.kwargs) -> Future[HandoffEnded]:
        thread, future = self._open_thread(), Future[HandoffEnded]()

        def begin() -> None:
            # In one step, so that words of one thread reach the session in their order.
            if not future.set_running_or_notify_cancel():
                return
            try:
                said = say(self._session, *words, **more)
            except RestowError as error:
                future.set_exception(error)
            else:
                said.add_done_callback(lambda end: _copy(end, future))

        thread.call_soon(begin)
        return future

    return call


def _asked(
    ask: Callable[Concatenate[EngineSession, P], Delivery],
) -> Callable[Concatenate[BlockingSession, P], BlockingDelivery]:
    """The same of a word whose end is a delivery."""

    @wraps(ask)
    def call(self: BlockingSession, /, *words: P.args, **more: P.kwargs) -> BlockingDelivery:
        thread = self._open_thread()
        asked: list[Delivery] = []

        def give_up() -> None:
            for one in asked:
                one.cancel()

        delivery = BlockingDelivery(lambda: thread.call_soon(give_up))

        def begin() -> None:
            try:
                one = ask(self._session, *words, **more)
            except RestowError as error:
                delivery.set_exception(error)
                delivery.pages_free.set_result(None)
                return
            asked.append(one)
            one.add_done_callback(lambda ended: _copy(ended, delivery))
            one.pages_free.add_done_callback(lambda freed: _copy(freed, delivery.pages_free))

        thread.call_soon(begin)
        return delivery

    return call


class BlockingSession:
    """`EngineSession` without ``await``: futures are `concurrent.futures.Future`."""

    def __init__(
        self,
        engine_id: str,
        incarnation: str,
        layout: Layout,
        broker: str | None = None,
        credentials: Credentials | None = None,
        on_lost: Callable[[RestowError], None] | None = None,
        *,
        publishes: bool = False,
        asks: bool = False,
    ) -> None:
        """Prepare, like `EngineSession`; ``on_lost`` is called in the session's thread."""
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
        )
        self._thread: LoopThread | None = None

    @property
    def is_open(self) -> bool:
        """Whether the broker knows the engine and hears it at the moment."""
        return self._session.is_open

    def start(self, timeout_s: float = 10.0) -> None:
        """Register the layout and open the stream.

        Raises like `EngineSession.start`; then the session is closed.
        """
        self._thread = LoopThread(self._name, _closed)
        try:
            self._thread.run(self._session.start(timeout_s))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Unregister and end the thread; futures that are pending end as CANCELLED."""
        thread, self._thread = self._thread, None
        if thread is not None:
            try:
                thread.run(self._session.close())
            finally:
                thread.close()

    def __enter__(self) -> Self:
        """Connect."""
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Unregister and close."""
        self.close()

    publish = _said(EngineSession.publish)
    request = _asked(EngineSession.request)
    decline = _asked(EngineSession.decline)

    def cancel(self, handoff_id: str, detail: str = "") -> None:
        """Give a handoff up."""
        if self._thread is not None:
            self._thread.call_soon(self._session.cancel, handoff_id, detail)

    def drain(self, timeout_s: float | None = None) -> bool:
        """Take part in nothing new, and wait for what is open to end, as `EngineSession.drain`."""
        return self._open_thread().run(self._session.drain(timeout_s))

    def _open_thread(self) -> LoopThread:
        if self._thread is None:
            raise _closed()
        return self._thread
