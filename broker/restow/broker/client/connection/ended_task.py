"""`end_task` cancels a task and waits until it has ended."""

from __future__ import annotations

import asyncio
from typing import Any


async def end_task(task: asyncio.Task[Any]) -> None:
    """Return when the task, which is cancelled now, has ended.

    A cancellation of the caller is not taken for the task's own. Raises what the task raised, if
    that was no cancellation.
    """
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.result()
