"""Fences: those that wait for a device, and those that were said, to be said again.

`WriteMarks` are the other way round: what an engine's own device still writes to memory that the
agent is to write to.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from restow.agents.memory.errors import ReadNotBegunError
from restow.broker.logs import get_logger
from restow.broker.rpc.sizes import check_size

MAX_FENCES = 1 << 17
ENDED_S = 5.0
"""So long a fence is kept of a handoff that has ended: a broker may die that has told the agent of
that, and not the engine, which publishes it again to the next one."""


def check_fence(handoff_id: str) -> None:
    """Raise `MessageTooLargeError` for an id that can't be sent."""
    check_size("the id of a handoff", len(handoff_id.encode()))


class DeviceEvent(Protocol):
    """Stands for a `torch.cuda.Event`, as far as a fence needs it."""

    def synchronize(self) -> object:
        """Wait until the work before the event is done. Raises `RuntimeError` if that failed."""


class Fences:
    """A rank's fences of handoffs that have not ended. Belongs to one event loop."""

    def __init__(self, say: Callable[[str, int], None]) -> None:
        """``say`` is called with a handoff's id once its bytes are complete.

        With how many leading tokens are, if not all: 0.
        """
        self._say = say
        self._waiting: set[asyncio.Task[None]] = set()
        self._said: dict[str, None] = {}
        """Handoffs, oldest first."""
        self._ended: OrderedDict[str, float] = OrderedDict()
        """Those that have ended lately, with when."""

    def fence(self, handoff_id: str, event: DeviceEvent | None, tokens: int = 0) -> None:
        """Say it when the work before ``event`` is done; without one, now.

        Of ``tokens`` leading ones it is said once: what comes next says more. If that work failed,
        nothing is said: the handoff ends by its time limit, and not well. Raises as `check_fence`.
        """
        check_fence(handoff_id)
        if event is None:
            self._say_and_keep(handoff_id, tokens)
            return
        task = asyncio.get_running_loop().create_task(self._wait(handoff_id, event, tokens))
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    def say_again(self, anew: bool = True) -> None:
        """Say all that were said, to somebody who forgot them.

        ``anew``: he is another one than before, and may not know of those that ended lately.
        """
        self._drop_old()
        if anew:
            self._said |= dict.fromkeys(self._ended)
            self._ended.clear()
        for handoff_id in self._said:
            self._say(handoff_id, 0)

    def forget(self, handoff_id: str) -> None:
        """The handoff has ended."""
        if handoff_id in self._said:
            del self._said[handoff_id]
            self._ended[handoff_id] = time.monotonic()
            self._drop_old()

    def _drop_old(self) -> None:
        since_s = time.monotonic() - ENDED_S
        while self._ended and next(iter(self._ended.values())) < since_s:
            self._ended.popitem(last=False)

    def cancel(self) -> None:
        """Say none of those that wait."""
        for task in self._waiting:
            task.cancel()

    async def _wait(self, handoff_id: str, event: DeviceEvent, tokens: int) -> None:
        if await _has_passed(event, handoff_id=handoff_id):
            self._say_and_keep(handoff_id, tokens)

    def _say_and_keep(self, handoff_id: str, tokens: int) -> None:
        """Of those kept the oldest go first, should a broker never tell that handoffs end."""
        if tokens:
            self._say(handoff_id, tokens)
            return
        self._said[handoff_id] = None
        if len(self._said) > MAX_FENCES:
            del self._said[next(iter(self._said))]
        self._say(handoff_id, 0)


class WriteMarks:
    """Marks up to which the engine's own writes to the rank's memory are done.

    Belongs to one event loop.
    """

    def __init__(self, say: Callable[[int], None] = lambda _: None) -> None:
        """``say`` hears each mark that is reached."""
        self._say = say
        self.reached = 0
        """The largest one; 0: none."""
        self._events: set[asyncio.Task[None]] = set()
        self._waiting: dict[asyncio.Future[None], int] = {}
        """Who waits, with the mark."""

    def done(self, mark: int, event: DeviceEvent | None) -> None:
        """Reach ``mark`` when the work before ``event`` is done; without an event, now.

        If that work failed the mark is not reached.
        """
        if event is None:
            self._reach(mark)
            return
        task = asyncio.get_running_loop().create_task(self._wait(mark, event))
        self._events.add(task)
        task.add_done_callback(self._events.discard)

    async def reach(self, mark: int, timeout_s: float) -> None:
        """Wait until ``mark`` is reached. Raises `ReadNotBegunError` after ``timeout_s``."""
        if mark <= self.reached:
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiting[waiter] = mark
        try:
            await asyncio.wait_for(waiter, timeout_s)
        except TimeoutError:
            raise ReadNotBegunError(
                f"the engine had not said until the grant had nearly ended that its own writes "
                f"before mark {mark} are done (it has up to {self.reached}): a step of it takes "
                f"longer, or nobody calls writes_done"
            ) from None
        finally:
            del self._waiting[waiter]

    def release(self) -> None:
        """Have all who wait give up: nobody hears any more what they would answer."""
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_exception(ReadNotBegunError("the stream of the order has ended"))

    def cancel(self) -> None:
        """Wait for no event any more."""
        for task in self._events:
            task.cancel()

    async def _wait(self, mark: int, event: DeviceEvent) -> None:
        if await _has_passed(event, write_mark=mark):
            self._reach(mark)

    def _reach(self, mark: int) -> None:
        if mark <= self.reached:
            return
        self.reached = mark
        for waiter, waited in self._waiting.items():
            if waited <= mark and not waiter.done():
                waiter.set_result(None)
        self._say(mark)


async def _has_passed(event: DeviceEvent, **of: object) -> bool:
    """Wait for an event on a thread; False if the work before it failed, which is logged."""
    try:
        await asyncio.to_thread(event.synchronize)
    except RuntimeError as error:
        log = get_logger("restow.agent")
        log.error("no fence: the device failed", detail=str(error), **of)
        return False
    return True
