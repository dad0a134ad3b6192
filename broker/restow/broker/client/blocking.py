"""An engine's session for threads: the loop runs in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self, TypeVar

import uvloop

from restow.broker.client.book import HandoffEnded
from restow.broker.client.credentials import Credentials
from restow.broker.client.session import Blocks, EngineSession
from restow.broker.errors import RestowError
from restow.broker.layout import Layout

T = TypeVar("T")


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
    ) -> None:
        """Prepare; `start` or ``with`` connects. ``on_lost`` is called in the session's thread."""
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name=f"restow-{engine_id}", daemon=True
        )
        self._arguments = (engine_id, incarnation, layout, broker, credentials, on_lost)
        self._session: EngineSession | None = None

    def start(self, timeout_s: float = 10.0) -> None:
        """Register the layout and open the stream.

        Raises like `EngineSession.start`; then the session is closed.
        """
        self._thread.start()

        async def start() -> EngineSession:
            session = EngineSession(*self._arguments)
            await session.start(timeout_s)
            return session

        try:
            self._session = self._run(start())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Unregister and end the thread; futures that are pending end as CANCELLED."""
        session, self._session = self._session, None
        if session is not None:
            self._run(self._finish(session))
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        if not self._loop.is_closed():
            self._loop.close()

    async def _finish(self, session: EngineSession) -> None:
        await session.close()
        await asyncio.sleep(0)  # The ends are copied to the threads' futures in this step.

    def __enter__(self) -> Self:
        """Connect."""
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Unregister and close."""
        self.close()

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
    ) -> Future[HandoffEnded]:
        """Publish blocks of a handoff; the future tells when P's pages are free again."""
        return self._ask(
            lambda session: session.publish(
                handoff_id,
                blocks,
                position_tokens,
                final=final,
                first_blocks=first_blocks,
                lease_ms=lease_ms,
                hold_ms=hold_ms,
                trace_parent=trace_parent,
            )
        )

    def request(
        self,
        handoff_id: str,
        blocks: Blocks,
        *,
        held_tokens: int = 0,
        position_tokens: int = 0,
        timeout_ms: int = 30_000,
        trace_parent: str = "",
    ) -> Future[HandoffEnded]:
        """Ask for a handoff's state; the future tells how it ended."""
        return self._ask(
            lambda session: session.request(
                handoff_id,
                blocks,
                held_tokens=held_tokens,
                position_tokens=position_tokens,
                timeout_ms=timeout_ms,
                trace_parent=trace_parent,
            )
        )

    def decline(self, handoff_id: str, detail: str = "") -> Future[HandoffEnded]:
        """Go on without a state; the future tells when the broker knows."""
        return self._ask(lambda session: session.decline(handoff_id, detail))

    def cancel(self, handoff_id: str, detail: str = "") -> None:
        """Give a handoff up."""
        if self._session is not None:
            self._loop.call_soon_threadsafe(self._session.cancel, handoff_id, detail)

    def _ask(
        self, say: Callable[[EngineSession], asyncio.Future[HandoffEnded]]
    ) -> Future[HandoffEnded]:
        session = self._session
        if session is None:
            raise RuntimeError("the session is not started, or closed")
        future: Future[HandoffEnded] = Future()

        def begin() -> None:
            # In one step, so that words of one thread reach the session in their order.
            if not future.set_running_or_notify_cancel():
                return
            try:
                end = say(session)
            except RestowError as error:
                future.set_exception(error)
            else:
                end.add_done_callback(copy)

        def copy(end: asyncio.Future[HandoffEnded]) -> None:
            error = end.exception()
            if error is None:
                future.set_result(end.result())
            else:
                future.set_exception(error)

        self._loop.call_soon_threadsafe(begin)
        return future

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
