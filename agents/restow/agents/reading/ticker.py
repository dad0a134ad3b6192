"""When to look after the transports: often while something is likely to happen, else rarely."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

BUSY_S = 0.001
ALERT_S = 0.005
ALERT_FOR_S = 10.0
REST_S = 0.1
SUSPECT_FOR_S = 0.05
WORK_S = 150e-6
"""An idle tick takes 2 to 80 us. One after a large read, which leaves nothing in the caches, may
take longer than this; the next one does not."""


class Ticker:
    """Calls ``work`` on an event loop, for peers that read over transports which need this side.

    A tick that takes long may have had work to do: it is looked again at once. Two in a row have
    had some; then more is likely to come. A rank that nobody reads is looked after rarely, because
    a host has many ranks.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        """`start` begins; ``work`` must not block."""
        self._work = work
        self._worked_s = self._suspected_s = -ALERT_FOR_S
        self._took_long = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._next: asyncio.TimerHandle | None = None

    def start(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Tick on ``loop``, or on the running one."""
        self._loop = loop or asyncio.get_running_loop()
        self._plan()

    def stop(self) -> None:
        """Tick no more. May be repeated."""
        self._loop = None
        if self._next is not None:
            self._next.cancel()

    def expect_work(self) -> None:
        """Something is about to happen."""
        self._worked_s = time.monotonic()
        self._plan()

    def _tick(self) -> None:
        # Time on the processor: on a crowded host an idle tick may last long too.
        began_s = time.thread_time()
        try:
            self._work()
        finally:
            took_long = time.thread_time() - began_s > WORK_S
            if took_long and self._took_long:
                self._worked_s = time.monotonic()
            elif took_long:
                self._suspected_s = time.monotonic()
            self._took_long = took_long
            self._plan()

    def _plan(self) -> None:
        if self._next is not None:
            self._next.cancel()
        if self._loop is not None:
            now_s = time.monotonic()
            pause = pause_s(now_s - self._worked_s)
            if now_s - self._suspected_s < SUSPECT_FOR_S:
                pause = min(pause, pause_s(now_s - self._suspected_s))
            self._next = self._loop.call_later(pause, self._tick)


def pause_s(idle_s: float) -> float:
    """Until the next tick, after so long without work: a quarter of it, within bounds."""
    if idle_s >= ALERT_FOR_S:
        return REST_S
    return min(max(idle_s / 4, BUSY_S), ALERT_S)
