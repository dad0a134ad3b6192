"""Calls that wait for the end of a demand outside of a session."""

from __future__ import annotations

import asyncio
import itertools

from restow.broker.core.common import actions as act
from restow.broker.core.common.keys import EngineKey
from restow.broker.errors import RestowError
from restow.broker.server import orders
from restow.v1 import broker_pb2

Ended = broker_pb2.Ended


class WaitingCalls:
    """Those of all engines, by handoff. Belongs to one event loop."""

    def __init__(self) -> None:
        """Nobody waits."""
        self._waiting: dict[tuple[EngineKey, str], list[asyncio.Future[Ended]]] = {}
        self._last = 0

    def begin(self, engine: EngineKey, handoff_id: str) -> tuple[int, asyncio.Future[Ended]]:
        """A number for a demand outside of a session, and its end as told to that engine.

        The numbers are negative: those of sessions' messages are not.
        """
        future: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        self._last -= 1
        key = (engine, handoff_id)
        self._waiting.setdefault(key, []).append(future)
        future.add_done_callback(lambda _: self._end(key, future))
        return self._last, future

    def _end(self, key: tuple[EngineKey, str], future: asyncio.Future[Ended]) -> None:
        self._waiting[key].remove(future)
        if not self._waiting[key]:
            del self._waiting[key]

    def tell(self, action: act.TellEnded) -> None:
        """A demand that was refused waits no longer: whatever waits said the same demand."""
        for future in self._waiting.get((action.engine, action.handoff_id), ()):
            if not future.done():
                ended = Ended()
                orders.fill_ended(ended, action)
                future.set_result(ended)

    def fail(self, engine: EngineKey, error: RestowError) -> None:
        """An engine is gone: what has ended, but not yet for it, never will."""
        calls = [calls for (of, _), calls in self._waiting.items() if of == engine]
        for future in itertools.chain(*calls):
            if not future.done():
                future.set_exception(error)

    def close(self) -> None:
        """Nobody is told any more."""
        for future in itertools.chain(*list(self._waiting.values())):
            future.cancel()
