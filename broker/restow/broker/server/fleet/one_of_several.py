"""A broker among others: it takes the pools that it owns, and lets go of those that it lost."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from restow.broker.core.common.actions import Action
from restow.broker.core.directory import Directory
from restow.broker.errors import NotOwnerError, OwnerUnknownError
from restow.broker.layout.values import Pool
from restow.broker.owners.actions import Drain, Lost, Serve
from restow.broker.owners.events import Drained, Idle, Wanted
from restow.broker.owners.held import Stage
from restow.broker.owners.registry import Registry
from restow.broker.owners.timing import Timing
from restow.broker.server.fleet.membership import Membership, OfPools
from restow.broker.server.fleet.report import FleetReport
from restow.broker.server.fleet.standing import OWN_S

IDLE_S = 60.0
"""How long a pool is owned in which nobody is."""


class OneOfSeveral:
    """Implements `Standing` over a registry, and moves engines of lost pools on."""

    among_others = True

    def __init__(
        self,
        registry: Registry,
        address: str,
        directory: Directory,
        perform: Callable[[list[Action]], None],
        all_said: Callable[[Pool], bool],
        moved: Callable[[], None],
        now_s: Callable[[], float],
        timing: Timing | None = None,
    ) -> None:
        """Prepare.

        ``perform`` carries out what the directory wants, ``all_said`` tells whether all that was
        decided in a pool is on its way, ``moved`` hears when pools have other owners.
        """
        self.membership = Membership(registry, address, self._act, timing, self._changed)
        self.address = address
        self._directory, self._perform, self._moved = directory, perform, moved
        self._all_said = all_said
        self._now_s = now_s
        self._draining: dict[Pool, int] = {}
        """With their epochs."""
        self._empty_since_s: dict[Pool, float] = {}
        self._news = asyncio.Event()

    @property
    def fleet(self) -> str:
        """The registry's name for itself, and for who shares it."""
        return self.membership.fleet

    def report(self) -> FleetReport:
        """How it stands among the others."""
        return self.membership.report()

    def epoch(self, pool: Pool) -> int:
        """The epoch in which it acts in a pool; 0: in none."""
        held = self.membership.member.held.get(pool)
        return 0 if held is None or held.stage is Stage.RELEASING else held.epoch

    def check(self, pool: Pool) -> None:
        """Raise `NotOwnerError` or `OwnerUnknownError` unless it owns a pool."""
        if self.epoch(pool):
            return
        owner = self.membership.where(pool)
        if owner is not None and owner != self.address:
            raise not_owner(pool, self.address, owner)
        trouble = self.membership.trouble
        why = "" if trouble is None else f" ({trouble.message})"
        raise OwnerUnknownError(
            f"no broker owns the pool of model {pool.model} at the moment: it goes on when one of "
            f"them has claimed it{why}",
            model=pool.model.name,
        )

    async def own(self, pool: Pool, unreached: str = "", within_s: float = OWN_S) -> None:
        """Claim a pool that is free and its own, and wait for that. Raises as `check` does.

        Who could not reach ``unreached`` waits until the pool is another one's.
        """
        if self.epoch(pool):
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while True:
                    news = self._news
                    self.membership.hear(Wanted(pool))
                    if self.membership.where(pool) not in (self.address, unreached or None, None):
                        break
                    if self.epoch(pool):
                        return
                    await news.wait()
        self.check(pool)

    def is_sure(self) -> bool:
        """Whether the lease has certainly not ended; True where nothing is owned."""
        return self.membership.is_sure()

    async def sure(self) -> None:
        """Wait until it is."""
        while not self.is_sure():
            await self._news.wait()

    def tick(self, now_s: float) -> None:
        """Look which pools are drained, and which nobody needs."""
        for pool, epoch in list(self._draining.items()):
            if not self._directory.granted_in(pool) and self._all_said(pool):
                del self._draining[pool]
                self.membership.hear(Drained(pool, epoch))
        there = self._directory.members.pools
        for pool in list(self.membership.member.held):
            if pool in there:
                self._empty_since_s.pop(pool, None)
            elif now_s - self._empty_since_s.setdefault(pool, now_s) > IDLE_S:
                del self._empty_since_s[pool]
                self.membership.hear(Idle(pool))

    # -- what the member wants of it --------------------------------------------------------------

    def _act(self, action: OfPools) -> None:
        granting, now_s = self._directory.granting, self._now_s()
        match action:
            case Serve(pool):
                self._draining.pop(pool, None)
                self._perform(granting.leave(pool, False, now_s))
            case Drain(pool, epoch):
                self._draining[pool] = epoch
                self._perform(granting.leave(pool, True, now_s))
            case Lost(pool, _, to):
                self._draining.pop(pool, None)
                self._empty_since_s.pop(pool, None)
                granting.leaving.discard(pool)
                error = not_owner(pool, self.address, to)
                self._perform(self._directory.members.move(pool, error, now_s))
        self._changed()

    def _changed(self) -> None:
        """Whoever waits looks again."""
        news, self._news = self._news, asyncio.Event()
        news.set()
        self._moved()


def not_owner(pool: Pool, address: str, owner: str | None) -> NotOwnerError:
    """Say where to go."""
    known = {} if owner is None or owner == address else {"owner": owner}
    where = f"ask {owner}" if known else "ask the others"
    return NotOwnerError(
        f"the broker at {address} does not own the pool of model {pool.model}: {where}",
        model=pool.model.name,
        **known,
    )
