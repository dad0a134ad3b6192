"""Engines that are expected: their agents came first."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from restow.broker.core.common.keys import EngineKey
from restow.broker.core.engines.account import Account
from restow.broker.core.engines.engine import EngineRecord
from restow.broker.core.membership import Membership, check_names
from restow.broker.errors import EngineUnknownError
from restow.broker.server.bounded_log import BoundedLog
from restow.broker.server.log_lines import tell_engine

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
