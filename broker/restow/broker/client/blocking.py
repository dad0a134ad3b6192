"""An engine's session for threads: the loop runs in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self, TypeVar

import uvloop

from restow.broker.client.session import Blocks, EngineSession, HandoffEnded
from restow.broker.layout import Layout

T = TypeVar("T")


class BlockingSession:
    """`EngineSession` without ``await``: futures are `concurrent.futures.Future`."""

    def __init__(
        self, engine_id: str, incarnation: str, layout: Layout, broker: str | None = None
    ) -> None:
        """Prepare; `start` or ``with`` connects."""
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name=f"restow-{engine_id}", daemon=True
        )
        self._arguments = (engine_id, incarnation, layout, broker)
        self._session: EngineSession | None = None

    def start(self, timeout_s: float = 10.0) -> None:
        """Register the layout and open the stream. Raises like `EngineSession.start`."""
        self._thread.start()

        async def start() -> EngineSession:
            session = EngineSession(*self._arguments)
            await session.start(timeout_s)
            return session

        self._session = self._run(start())

    def close(self) -> None:
        """Unregister and end the thread."""
        if self._session is not None:
            self._run(self._session.close())
            self._session = None
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()

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
            )
        )

    def request(
        self, handoff_id: str, blocks: Blocks, *, held_tokens: int = 0, timeout_ms: int = 30_000
    ) -> Future[HandoffEnded]:
        """Ask for a handoff's state; the future tells how it ended."""
        return self._ask(
            lambda session: session.request(
                handoff_id, blocks, held_tokens=held_tokens, timeout_ms=timeout_ms
            )
        )

    def cancel(self, handoff_id: str, detail: str = "") -> None:
        """Give a handoff up."""
        if self._session is not None:
            self._loop.call_soon_threadsafe(self._session.cancel, handoff_id, detail)

    def _ask(
        self, say: Callable[[EngineSession], asyncio.Future[HandoffEnded]]
    ) -> Future[HandoffEnded]:
        session = self._session
        if session is None:
            raise RuntimeError("the session is not started")

        async def ask() -> HandoffEnded:
            return await say(session)

        return asyncio.run_coroutine_threadsafe(ask(), self._loop)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
