"""Fences of a rank: waiting for a device, announced, or kept to be announced again.

A fence tells the broker that P's bytes are complete. `WriteMarks` protect the other direction: they
tell which of the engine's own device writes have ended before the agent writes to the same memory.
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
"""Time for which the fence of an ended handoff is kept.

A broker may die after it has told the agent of the end, but not the engine; the engine then
publishes the handoff again to the next broker.
"""


def check_fence(handoff_id: str) -> None:
    """Raise `MessageTooLargeError` if a handoff id is too long to be sent."""
    check_size("the id of a handoff", len(handoff_id.encode()))


class DeviceEvent(Protocol):
    """The part of `torch.cuda.Event` that a fence needs."""

    def synchronize(self) -> object:
        """Wait for the work before the event. Raises `RuntimeError` if that work failed."""


class Fences:
    """Fences of a rank's handoffs that have not ended. Belongs to one event loop."""

    def __init__(self, say: Callable[[str, int], None]) -> None:
        """Call ``say`` with the id of each handoff whose bytes are complete.

        Its second argument is the number of leading tokens that are complete, or 0 for all.
        """
        self._say = say
        self._waiting: set[asyncio.Task[None]] = set()
        self._said: dict[str, None] = {}
        """Announced handoffs, oldest first."""
        self._ended: OrderedDict[str, float] = OrderedDict()
        """Handoffs that ended lately, with the time of their end."""

    def fence(self, handoff_id: str, event: DeviceEvent | None, tokens: int = 0) -> None:
        """Announce the fence when the work before ``event`` is done; without an event, now.

        A fence of ``tokens`` leading tokens is announced once and not kept, because later fences
        supersede it. If the work failed, nothing is announced, and the handoff fails at its time
        limit. Raises as `check_fence`.
        """
        check_fence(handoff_id)
        if event is None:
            self._say_and_keep(handoff_id, tokens)
            return
        task = asyncio.get_running_loop().create_task(self._wait(handoff_id, event, tokens))
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    def say_again(self, anew: bool = True) -> None:
        """Announce all kept fences again, to a broker that does not know them.

        ``anew`` says that the broker is a new process, which may not know of handoffs that
        ended lately.
        """
        self._drop_old()
        if anew:
            self._said |= dict.fromkeys(self._ended)
            self._ended.clear()
        for handoff_id in self._said:
            self._say(handoff_id, 0)

    def forget(self, handoff_id: str) -> None:
        """Note that a handoff has ended."""
        if handoff_id in self._said:
            del self._said[handoff_id]
            self._ended[handoff_id] = time.monotonic()
            self._drop_old()

    def _drop_old(self) -> None:
        since_s = time.monotonic() - ENDED_S
        while self._ended and next(iter(self._ended.values())) < since_s:
            self._ended.popitem(last=False)

    def cancel(self) -> None:
        """Stop waiting; announce none of the pending fences."""
        for task in self._waiting:
            task.cancel()

    async def _wait(self, handoff_id: str, event: DeviceEvent, tokens: int) -> None:
        if await _has_passed(event, handoff_id=handoff_id):
            self._say_and_keep(handoff_id, tokens)

    def _say_and_keep(self, handoff_id: str, tokens: int) -> None:
        """Announce and keep a fence; drop the oldest if a broker never tells that handoffs end."""
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
        """Call ``say`` with each mark that is reached."""
        self._say = say
        self.reached = 0
        """The largest mark reached; 0 for none."""
        self._events: set[asyncio.Task[None]] = set()
        self._waiting: dict[asyncio.Future[None], int] = {}
        """Waiting orders, with their mark."""

    def done(self, mark: int, event: DeviceEvent | None) -> None:
        """Reach ``mark`` when the work before ``event`` is done; without an event, now.

        A mark is not reached if its work failed.
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
                f"the engine did not report in the time of the grant that its own writes before "
                f"mark {mark} are done (it has reported {self.reached}): either one of its steps "
                f"takes longer, or nobody calls writes_done"
            ) from None
        finally:
            del self._waiting[waiter]

    def release(self) -> None:
        """Make all waiting orders fail, because nobody reads their answers any more."""
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_exception(ReadNotBegunError("the stream that sent the order has ended"))

    def cancel(self) -> None:
        """Stop waiting for events."""
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
    """Wait for an event on a thread; log and return False if the work before it failed."""
    try:
        await asyncio.to_thread(event.synchronize)
    except RuntimeError as error:
        log = get_logger("restow.agent")
        log.error("no fence is sent: the device failed", detail=str(error), **of)
        return False
    return True
