"""First messages of calls, read in turns, so that no tenant has many half read ones held for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any
from weakref import WeakValueDictionary

from restow.broker.errors import FirstMessageLateError

AT_ONCE = 32
"""Of one tenant, each of 16 MiB at most; gRPC takes a few kilobytes of those that wait.

A client may open a stream and write later: fewer turns would soon be taken by such streams."""
WAIT_S = 10.0


class FirstMessages:
    """Reads the first message of each call that was let in. Belongs to one event loop."""

    def __init__(self) -> None:
        """Nobody has sent anything."""
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def read(self, read: Callable[[], Awaitable[Any]], tenant: str) -> Any:
        """The first message by ``read``, which may be `grpc.aio.EOF`.

        Raises `FirstMessageLateError`.
        """
        turn = self._turns.setdefault(tenant, asyncio.Semaphore(AT_ONCE))
        async with turn:
            try:
                async with asyncio.timeout(WAIT_S):
                    return await read()
            except TimeoutError:
                raise FirstMessageLateError(
                    f"the call's first message did not come whole within {WAIT_S:g} s: see whether "
                    f"the client was stopped, or its network is slow, and call again"
                ) from None
