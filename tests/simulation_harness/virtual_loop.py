"""An event loop whose time stands still while anything is to be done, and processes that may die.

The code under test is the real one: it sees an asyncio loop. What runs in the context of a process
does not run while that is paused, and never after it was killed.
"""

from __future__ import annotations

import asyncio
import heapq
import selectors
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any

CURRENT: ContextVar[Process | None] = ContextVar("process", default=None)


class Process:
    """What pauses and dies as one, on a host."""

    def __init__(self, loop: VirtualLoop, name: str, host: str) -> None:
        self.name, self.host = name, host
        self.alive, self.paused = True, False
        self._loop = loop
        self._parked: deque[asyncio.Handle] = deque()
        self.context = copy_context()
        self.context.run(CURRENT.set, self)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine as a part of the process."""
        return self._loop.create_task(work, context=self.context.copy())

    def later(self, delay_s: float, call: Callable[..., object], *args: object) -> None:
        """Call something in the process, after a while."""
        self._loop.call_later(delay_s, call, *args, context=self.context.copy())

    def soon(self, call: Callable[..., object], *args: object) -> None:
        """Call something in the process."""
        self._loop.call_soon(call, *args, context=self.context.copy())

    def kill(self) -> None:
        """Nothing of it happens any more."""
        self.alive = False
        self._parked.clear()

    def pause(self) -> None:
        """As SIGSTOP does."""
        self.paused = True

    def resume(self) -> None:
        """As SIGCONT does: first comes what was due meanwhile."""
        self.paused = False
        parked, self._parked = self._parked, deque()
        self._loop.hurry(parked)

    def admits(self, handle: asyncio.Handle) -> bool:
        """Whether a callback may run now; one that may later is kept."""
        if self.alive and self.paused:
            self._parked.append(handle)
        return self.alive and not self.paused


class _Handle(asyncio.Handle):
    process: Process | None = None

    def _run(self) -> None:
        if self.process is None or self.process.admits(self):
            super()._run()


class _Timer(asyncio.TimerHandle):
    process: Process | None = None

    def _run(self) -> None:
        if self.process is None or self.process.admits(self):
            super()._run()


class _Selector(selectors.SelectSelector):
    """Waits by letting virtual time pass."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("the simulation stands still: nothing is left to happen")
        self.now_s += max(timeout, 0.0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time passes only when nothing is ready; work given to threads is done at once."""

    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)
        self._clock_resolution = 1e-9
        # A task of a killed process is never awaited to its end.
        self.set_exception_handler(lambda loop, context: self._broke(context))
        self.broken: list[dict[str, Any]] = []

    def time(self) -> float:
        """Virtual seconds."""
        return self._clock.now_s

    def _check_closed(self) -> None:
        """Tasks of killed processes are swept up after the end, and may say so to nobody."""

    def hurry(self, handles: deque[asyncio.Handle]) -> None:
        """Run handles as soon as possible."""
        self._ready.extend(  # type: ignore[attr-defined]
            handle for handle in handles if not handle.cancelled()
        )

    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: object,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """As asyncio has it, in the process of the context."""
        timer = _Timer(when, callback, args, self, context)
        timer.process = _process(context)
        heapq.heappush(self._scheduled, timer)  # type: ignore[attr-defined]
        timer._scheduled = True  # type: ignore[attr-defined]
        return timer

    def _call_soon(
        self, callback: Callable[..., object], args: tuple[object, ...], context: Context | None
    ) -> asyncio.Handle:
        handle = _Handle(callback, args, self, context)
        handle.process = _process(context)
        self._ready.append(handle)  # type: ignore[attr-defined]
        return handle

    def run_in_executor(
        self, executor: object, function: Callable[..., Any], *args: object
    ) -> asyncio.Future[Any]:
        """Do it here and now."""
        future = self.create_future()
        try:
            future.set_result(function(*args))
        except Exception as error:  # noqa: BLE001 - as a thread hands it on
            future.set_exception(error)
        return future

    def _broke(self, context: dict[str, Any]) -> None:
        if "exception" in context:
            self.broken.append(context)


def _process(context: Context | None) -> Process | None:
    return CURRENT.get() if context is None else context.get(CURRENT)
