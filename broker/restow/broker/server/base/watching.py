"""Watchers: who follows what a tenant's engines hold, and waits for more."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from restow.broker.core.prefix.changes import Follower, Part
from restow.broker.core.prefix.prefixes import Prefixes
from restow.broker.errors import QuotaExceededError

MAX_WATCHERS = 64
"""Watchers of a tenant at a time."""
LOOK_S = 1.0
"""How long a watcher waits for news before it looks whether the broker still leads."""


@dataclass(frozen=True, slots=True)
class Watcher:
    """A follower, and the news that wake it. Belongs to one event loop."""

    follower: Follower
    news: asyncio.Event

    async def next(self) -> Part | None:
        """Return what comes next; None if nothing has for `LOOK_S`."""
        await asyncio.sleep(0)  # a snapshot may be long, so let others have their turn
        part = self.follower.take()
        if part is None:
            self.news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self.news.wait()
        return part or self.follower.take()


class Watchers:
    """The watchers of all tenants."""

    def __init__(self, prefixes: Prefixes, perform: Callable[[list[Any]], None]) -> None:
        """Begin without watchers. ``perform`` carries out actions of the directory."""
        self._prefixes, self._perform = prefixes, perform
        self._count: Counter[str] = Counter()
        self.closed = False
        """Whether the broker ends, and all watchers should."""

    @contextlib.contextmanager
    def watching(self, tenant: str) -> Iterator[Watcher]:
        """Follow a tenant's holdings inside the ``with``. Raises `QuotaExceededError`."""
        if self._count[tenant] >= MAX_WATCHERS:
            words = f"{MAX_WATCHERS} streams watch tenant {tenant} already: end some"
            raise QuotaExceededError(words, tenant=tenant, what="watchers", limit=MAX_WATCHERS)
        news = asyncio.Event()
        follower, actions = self._prefixes.follow(tenant, news.set)
        self._count[tenant] += 1
        try:
            self._perform(actions)
            yield Watcher(follower, news)
        finally:
            self._count -= Counter({tenant: 1})
            self._prefixes.unfollow(tenant, news.set)
