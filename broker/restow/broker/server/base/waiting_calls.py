"""Calls that wait for the end of a demand outside of a session."""

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
from restow.broker.server.base import orders
from restow.broker.server.base.logging import BoundedLog, tell_engine
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


WAIT_S = 60.0
MAX_WAITING = 100_000


class Expected:
    """Has agents wait for their engines: thousands that asked again would keep a broker busy.

    All methods belong to one event loop.
    """

    def __init__(
        self,
        members: Membership,
        log: BoundedLog,
        wait_s: float = WAIT_S,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        """Look engines up in ``members``; say in ``log`` that somebody waits."""
        self._log = log
        self.wait_s = wait_s
        self.max_waiting = max_waiting
        self._members = members
        self._waiting: dict[EngineKey, dict[asyncio.Future[None], None]] = {}
        """Those that came first are let in first."""
        self._count = 0
        self._closed = False

    @property
    def waiting(self) -> int:
        """How many agents wait."""
        return self._count

    async def engine(
        self,
        key: EngineKey,
        incarnation: str,
        account: Account,
        size_bytes: int,
        owned: Callable[[], None] = lambda: None,
    ) -> EngineRecord:
        """Look an engine up; if it is not there, it has ``wait_s`` to come.

        Whoever waits has ``account`` carry ``size_bytes``. Raises like `Membership.engine`, what
        `Account.carry` raises, `RequestError` for what no engine can be called, and what ``owned``
        raises: that it will never come here.
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
        """An engine has registered."""
        for future in self._waiting.get(key, ()):
            if not future.done():
                future.set_result(None)

    def look_again(self) -> None:
        """Something has changed that concerns engines that have not come."""
        for key in self._waiting:
            self.came(key)

    def close(self) -> None:
        """Nobody is waited for any more."""
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
