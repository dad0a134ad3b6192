"""The orders that an agent works on, each in a task of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any

from restow.agents.errors import AgentBusyError

MAX_ORDERS = 4096
Key = tuple[str, int, int]
"""The kind of an order, its handoff or probe, and which part of it."""


class OrderTasks:
    """Runs work on orders side by side. Belongs to one event loop."""

    def __init__(self, rank: int) -> None:
        """Nothing is worked on; ``rank`` is whose orders they are."""
        self._rank = rank
        self._tasks: dict[Key, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        """How many orders are worked on."""
        return len(self._tasks)

    def __iter__(self) -> Iterator[Key]:
        """The keys of the orders that are worked on."""
        return iter(self._tasks)

    def check_load(self) -> None:
        """Raise `AgentBusyError` for more orders than an agent works on at once."""
        if len(self._tasks) > MAX_ORDERS:
            raise AgentBusyError(f"rank {self._rank} works on {MAX_ORDERS} orders already")

    def begin(self, key: Key, work: Coroutine[Any, Any, None]) -> None:
        """Work on an order beside the others; one that is being worked on changes nothing."""
        if key in self._tasks:
            work.close()
            return
        task = self._tasks[key] = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._tasks.pop(key, None))

    def cancel(self, *kinds: str, number: int | None = None) -> None:
        """Cancel the work on these kinds of orders, of all handoffs and probes or of one."""
        for (kind, of, _), task in list(self._tasks.items()):
            if kind in kinds and number in (None, of):
                task.cancel()

    async def drain(self, *kinds: str) -> None:
        """Cancel the work on these kinds of orders, and wait for all."""
        self.cancel(*kinds)
        if self._tasks:
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
