"""Fences: those that wait for a device, and those that were said, to be said again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import structlog

MAX_FENCES = 1 << 17


class DeviceEvent(Protocol):
    """A `torch.cuda.Event`, as far as a fence needs it."""

    def synchronize(self) -> object:
        """Wait until the work before the event is done. Raises `RuntimeError` if that failed."""


class PendingFences:
    """Fences whose device still works; the waiting is done on threads. One event loop."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """``say`` is called with a handoff's id once its bytes are complete."""
        self._say = say
        self._tasks: set[asyncio.Task[None]] = set()

    def fence(self, handoff_id: str, event: DeviceEvent | None) -> None:
        """Say it when the work before ``event`` is done; without one, now.

        If that work failed, nothing is said: the handoff ends by its time limit, and not well.
        """
        if event is None:
            self._say(handoff_id)
            return
        task = asyncio.get_running_loop().create_task(self._wait(handoff_id, event))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cancel(self) -> None:
        """Say none of those that wait."""
        for task in self._tasks:
            task.cancel()

    async def _wait(self, handoff_id: str, event: DeviceEvent) -> None:
        try:
            await asyncio.to_thread(event.synchronize)
        except RuntimeError as error:
            log = structlog.get_logger("restow.agent")
            log.error("no fence: the device failed", handoff_id=handoff_id, detail=str(error))
            return
        self._say(handoff_id)


class KeptFences:
    """The fences of handoffs that have not ended, to be said again to a broker that forgot them."""

    def __init__(self) -> None:
        """None yet."""
        self._fences: dict[str, None] = {}

    def add(self, handoff_id: str) -> None:
        """Keep one more; the oldest go first, should a broker never tell that handoffs end."""
        self._fences[handoff_id] = None
        if len(self._fences) > MAX_FENCES:
            del self._fences[next(iter(self._fences))]

    def forget(self, handoff_id: str) -> None:
        """The handoff has ended."""
        self._fences.pop(handoff_id, None)

    def kept(self) -> list[str]:
        """Ids of the handoffs, oldest first."""
        return list(self._fences)
