"""Calls that wait: for the end of a demand outside of a session, or for an engine to register."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable

from restow.broker.core.common import actions as act
from restow.broker.core.common.keys import EngineKey
from restow.broker.core.engines.account import Account
from restow.broker.core.engines.engine import EngineRecord
from restow.broker.core.membership import Membership, check_names
from restow.broker.errors import EngineUnknownError, RestowError
from restow.broker.server.base.logging import BoundedLog, tell_engine
from restow.broker.server.base.outbox import fill_ended
from restow.v1 import broker_pb2

Ended = broker_pb2.Ended


class WaitingCalls:
    """Waiting calls of all engines, by handoff. Belongs to one event loop."""

    def __init__(self) -> None:
        """Begin without calls."""
        self._waiting: dict[tuple[EngineKey, str], list[asyncio.Future[Ended]]] = {}
        self._last = 0

    def begin(self, engine: EngineKey, handoff_id: str) -> tuple[int, asyncio.Future[Ended]]:
        """Return a number for a demand outside of a session, and a future of its end.

        The numbers are negative, because the numbers of sessions' messages are not.
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
        """Tell the waiting calls that their demand has ended; all of them made the same demand."""
        for future in self._waiting.get((action.engine, action.handoff_id), ()):
            if not future.done():
                ended = Ended()
                fill_ended(ended, action)
                future.set_result(ended)

    def fail(self, engine: EngineKey, error: RestowError) -> None:
        """Fail the calls of an engine that is gone, which can be told of no end any more."""
        calls = [calls for (of, _), calls in self._waiting.items() if of == engine]
        for future in itertools.chain(*calls):
            if not future.done():
                future.set_exception(error)

    def close(self) -> None:
        """Cancel all waiting calls."""
        for future in itertools.chain(*list(self._waiting.values())):
            future.cancel()


WAIT_S = 60.0
MAX_WAITING = 100_000


class Expected:
    """Makes agents wait for their engines, because thousands of retries would keep a broker busy.

    All methods belong to one event loop.
    """

    def __init__(
        self,
        members: Membership,
        log: BoundedLog,
        wait_s: float = WAIT_S,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        """Look engines up in ``members``; note in ``log`` that agents wait."""
        self._log = log
        self.wait_s = wait_s
        self.max_waiting = max_waiting
        self._members = members
        self._waiting: dict[EngineKey, dict[asyncio.Future[None], None]] = {}
        """Waiting agents by engine; those that came first are admitted first."""
        self._count = 0
        self._closed = False

    @property
    def waiting(self) -> int:
        """Number of waiting agents."""
        return self._count

    async def engine(
        self,
        key: EngineKey,
        incarnation: str,
        account: Account,
        size_bytes: int,
        owned: Callable[[], None] = lambda: None,
    ) -> EngineRecord:
        """Look an engine up; wait up to ``wait_s`` for it if it has not registered.

        ``account`` carries ``size_bytes`` during the wait. Raises like `Membership.engine`, what
        `Account.carry` raises, `RequestError` for an impossible engine name, and what ``owned``
        raises if the engine will never register here.
        """
        check_names(key, incarnation)
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self.wait_s
        while True:
            owned()
            try:
                return self._members.engine(key, incarnation)
            except EngineUnknownError:
                if loop.time() >= until_s or self._count >= self.max_waiting or self._closed:
                    raise
            with account.carrying(size_bytes):
                await self._wait(key, loop.create_future(), until_s)

    def came(self, key: EngineKey) -> None:
        """Wake the agents of an engine that has registered."""
        for future in self._waiting.get(key, ()):
            if not future.done():
                future.set_result(None)

    def look_again(self) -> None:
        """Wake all agents, because something that concerns them has changed."""
        for key in self._waiting:
            self.came(key)

    def close(self) -> None:
        """Stop waiting for engines."""
        self._closed = True
        self.look_again()

    async def _wait(self, key: EngineKey, came: asyncio.Future[None], until_s: float) -> None:
        if key not in self._waiting:
            tell_engine(self._log, "agents wait for their engine", key)
        waiting = self._waiting.setdefault(key, {})
        waiting[came] = None
        self._count += 1
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(until_s):
                    await came
        finally:
            self._count -= 1
            waiting.pop(came, None)
            if not waiting:
                self._waiting.pop(key, None)
