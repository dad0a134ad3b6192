"""An event loop on its own thread, for callers without a loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import uvloop

from restow.broker.client.connection.channel import OWN_PROCESS
from restow.broker.client.connection.errors import ForkedError

T = TypeVar("T")
SETTLE_S = 0.02


class LoopThread:
    """A thread that runs a uvloop until `close`."""

    def __init__(self, name: str, closed: Callable[[], Exception]) -> None:
        """Start the thread. After `close`, methods raise the error that ``closed`` makes.

        Like all methods it raises `ForkedError` in a process that was forked later.
        """
        OWN_PROCESS.check()
        self._closed = closed
        self._loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop, and wait for its result."""
        return self.start(work).result()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop; return a future of its result."""
        try:
            OWN_PROCESS.check()
        except ForkedError:
            work.close()
            raise
        if self._loop.is_closed():
            work.close()
            raise self._closed()
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call_soon(self, call: Callable[..., object], *args: object) -> None:
        """Schedule a function on the loop."""
        OWN_PROCESS.check()
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:
            raise self._closed() from None

    def close(self) -> None:
        """End the loop and its thread. May be called again."""
        OWN_PROCESS.check()
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            # gRPC's poller may still deliver events of calls that have just ended.
            self._loop.run_until_complete(asyncio.sleep(SETTLE_S))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()
