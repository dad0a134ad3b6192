"""What ends a task does not take its caller's cancellation for the task's own."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from restow.broker.client.connection.errors import end_task


async def test_a_caller_that_is_cancelled_meanwhile_hears_of_it() -> None:
    begun, may_end = asyncio.Event(), asyncio.Event()

    async def slow() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            await may_end.wait()

    task = asyncio.create_task(slow())
    await begun.wait()
    closing = asyncio.create_task(end_task(task))
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert not task.done()
    may_end.set()
    await end_task(task)
    assert task.cancelled()


async def test_what_a_task_raised_is_raised() -> None:
    async def fails() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        raise ValueError("broken")

    task = asyncio.create_task(fails())
    await asyncio.sleep(0)
    with pytest.raises(ValueError, match="broken"):
        await end_task(task)
