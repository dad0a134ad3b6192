"""Waiting for what no event tells."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

WAIT_S = 20.0


async def until(condition: Callable[[], bool], within_s: float = WAIT_S) -> None:
    """Return when the condition holds; fail after a while."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - conditions of other processes have no event
            await asyncio.sleep(0.002)
