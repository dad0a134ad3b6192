"""An event loop whose time stands still while anything is to be done, and processes that may die.

The code under test is the real one: it sees an asyncio loop. What runs in the context of a process
does not run while that is paused, and never after it was killed.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextvars import Context, ContextVar, copy_context
from typing import Any

RESOLUTION_S = 1e-9
CURRENT: ContextVar[Process | None] = ContextVar("process", default=None)


class Process:
    """What pauses and dies as one, on a host."""

    def __init__(self, loop: VirtualLoop, name: str, host: str, pace: float = 1.0) -> None:
        self.name, self.host = name, host
        self.pace = pace
        """Of its clock, which goes on while it stands still."""
        self.alive, self.paused, self.pauses = True, False, 0
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
        """Kill the process: none of its callbacks runs any more."""
        self.alive = False
        self._parked.clear()

    def pause(self) -> None:
        """Pause the process as SIGSTOP does."""
        self.paused = True
        self.pauses += 1

    def resume(self) -> None:
        """Resume the process as SIGCONT does: what was due meanwhile runs first."""
        self.paused = False
        parked, self._parked = self._parked, deque()
        self._loop.hurry(parked)

    def admits(self, handle: asyncio.Handle) -> bool:
        """Return whether a callback may run now; a callback of a paused process is kept."""
        if self.alive and self.paused:
            self._parked.append(handle)
        return self.alive and not self.paused


class _Timer(asyncio.TimerHandle):
    """What a loop calls, in a process. Most of what a history costs is spent in these few lines."""

    def __init__(
        self,
        when: float,
        callback: Callable[..., object],
        args: Sequence[object],
        loop: VirtualLoop,
        context: Context | None,
    ) -> None:
        # As asyncio's own, less what is for its debug mode.
        self._when, self._scheduled = when, False
        self._loop, self._callback, self._args = loop, callback, args
        self._cancelled, self._repr, self._source_traceback = False, None, None
        self._context = copy_context() if context is None else context
        self._process = self._context.get(CURRENT)

    def cancel(self) -> None:
        self._cancelled = True

    def _run(self) -> None:
        if self._process is not None and not self._process.admits(self):
            return
        try:
            self._context.run(self._callback, *self._args)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # noqa: BLE001 - as asyncio has it
            self._loop.call_exception_handler({"exception": error, "handle": self})


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time passes only when nothing is ready; work given to threads is done at once."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        self._waiting: list[tuple[float, int, _Timer]] = []
        self._numbers = itertools.count()
        self._due: deque[asyncio.Handle] = deque()
        # A task of a killed process is never awaited to its end.
        self.set_exception_handler(lambda loop, context: self._broke(context))
        self.broken: list[dict[str, Any]] = []

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._now_s

    def _run_once(self) -> None:
        """Run one turn as asyncio does, but for sockets: there are none, and a look takes long."""
        due, waiting = self._due, self._waiting
        if not due:
            while waiting and waiting[0][2].cancelled():
                heapq.heappop(waiting)
            if waiting:
                self._now_s = max(self._now_s, waiting[0][0])
            elif not self._stopping:  # type: ignore[attr-defined]
                raise RuntimeError("the simulation stands still: nothing is left to happen")
        until_s = self._now_s + RESOLUTION_S
        while waiting and waiting[0][0] < until_s:
            due.append(heapq.heappop(waiting)[2])
        # What these make due runs the next time, after the timers that are due by then.
        for _ in range(len(due)):
            handle = due.popleft()
            if not handle._cancelled:
                handle._run()

    def _check_closed(self) -> None:
        """Do nothing: tasks of killed processes are swept up after the end."""

    def hurry(self, handles: deque[asyncio.Handle]) -> None:
        """Run handles as soon as possible."""
        self._due.extend(handle for handle in handles if not handle.cancelled())

    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: object,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Call as asyncio does, in the process of the context."""
        return self.call_later(when - self._now_s, callback, *args, context=context)

    def call_later(
        self,
        delay: float,
        callback: Callable[..., object],
        *args: object,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Call as asyncio does, in the process of the context."""
        when = self._now_s + delay
        timer = _Timer(when, callback, args, self, context)
        heapq.heappush(self._waiting, (when, next(self._numbers), timer))
        return timer

    def call_soon(
        self, callback: Callable[..., object], *args: object, context: Context | None = None
    ) -> asyncio.Handle:
        """Call as asyncio does, in the process of the context."""
        handle = _Timer(self._now_s, callback, args, self, context)
        self._due.append(handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[..., object], *args: object, context: Context | None = None
    ) -> asyncio.Handle:
        """Do the same as `call_soon`: there are no other threads. Generators are closed by it."""
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(
        self, executor: object, function: Callable[..., Any], *args: object
    ) -> asyncio.Future[Any]:
        """Run the function here and now."""
        future = self.create_future()
        try:
            future.set_result(function(*args))
        except Exception as error:  # noqa: BLE001 - as a thread hands it on
            future.set_exception(error)
        return future

    def _broke(self, context: dict[str, Any]) -> None:
        if "exception" in context:
            self.broken.append(context)
