"""Runs this broker as one of several: its member over a registry, on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from typing import Any

from restow.broker.errors import RestowError
from restow.broker.layout.values import Pool
from restow.broker.logs import get_logger
from restow.broker.owners.actions import (
    Action,
    Drain,
    Join,
    KeepAlive,
    Left,
    Lost,
    ReleasePool,
    Revoke,
    Serve,
    TakePool,
    Withdraw,
)
from restow.broker.owners.events import (
    Claimed,
    ClaimFailed,
    Event,
    Joined,
    JoinFailed,
    KeptAlive,
    LeaseGone,
    Leave,
    Released,
    Tick,
    Withdrawn,
)
from restow.broker.owners.held import Stage
from restow.broker.owners.member import Member
from restow.broker.owners.registry import LeaseEndedError, Registry
from restow.broker.owners.timing import Timing
from restow.broker.server.fleet.report import FleetReport, LeaseReport, PoolReport
from restow.broker.server.fleet.sightings import Sightings

TICK_S = 0.05
OfPools = Serve | Drain | Lost
"""What the broker has to do."""


def seconds_awake_or_not() -> float:
    """A clock that goes on while the host sleeps: the registry's does, and ends the lease."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Membership:
    """One broker among several. `run` it; all else is said and asked on the same loop."""

    def __init__(
        self,
        registry: Registry,
        address: str,
        act: Callable[[OfPools], object],
        timing: Timing | None = None,
        changed: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = seconds_awake_or_not,
    ) -> None:
        """Prepare: ``act`` is told which pools are served, drained and lost.

        ``changed`` is called when it may act again, or others own other pools than before.
        """
        self.fleet = ""
        """The registry's name for itself, once it has let this member in."""
        self._registry, self._act, self._clock = registry, act, clock
        self._changed = changed
        self._timing = timing or Timing()
        self.member = Member(address, self._timing)
        self._sightings = Sightings(address)
        self._taken = self._lost = 0
        self.trouble: RestowError | None = None
        """Why the last call of the registry failed; None: it did not."""
        self._tasks: asyncio.TaskGroup | None = None
        self._left = asyncio.Event()
        self._log = get_logger("restow.brokers")

    def may_grant(self, pool: Pool) -> int | None:
        """The epoch in which handoffs of the pool may be granted now; None: not here."""
        return self.member.may_grant(pool, self._clock())

    def may_end(self, pool: Pool) -> int | None:
        """The epoch in which handoffs of the pool may be ended now; None: not here."""
        return self.member.may_end(pool, self._clock())

    def is_sure(self) -> bool:
        """Whether the lease has certainly not ended; True where nothing is owned."""
        if not self.member.held:
            return True
        lease = self.member.lease
        return lease is not None and lease.may_act(self._clock(), self._timing.margin_s)

    def where(self, pool: Pool) -> str | None:
        """The address of who owns a pool or is about to; None: it is not known."""
        return self.member.where(pool)

    def hear(self, event: Event) -> None:
        """Take what the broker has to say: `Wanted`, `Idle`, `Drained`, `Leave`."""
        now_s = self._clock()
        self._sightings.see(event, now_s)
        for action in self.member.on(event, now_s):
            # A pool that is served again, because nobody else is to own it any more, was not lost.
            self._taken += isinstance(action, Serve) and isinstance(event, Claimed)
            self._lost += isinstance(action, Lost)
            self._carry_out(action)

    def report(self) -> FleetReport:
        """How it stands now, and what it knows of the others."""
        now_s, member, seen = self._clock(), self.member, self._sightings

        def age_s(at_s: float | None) -> float | None:
            return None if at_s is None else now_s - at_s

        pools = {
            pool: PoolReport(one.address, one.epoch, age_s(seen.claim(pool, one.epoch)))
            for pool, one in member.view.claims.items()
        }
        for pool, held in member.held.items():
            if held.stage is not Stage.RELEASING:
                began = age_s(seen.claim(pool, held.epoch))
                leaving = held.stage is not Stage.SERVING
                pools[pool] = PoolReport(member.address, held.epoch, began, True, leaving)
        return FleetReport(
            member.address,
            self.fleet,
            {one: age_s(seen.member(one)) for one in sorted(member.view.members)},
            pools,
            self._lease_report(now_s),
            self.trouble,
            self._taken,
            self._lost,
        )

    def _lease_report(self, now_s: float) -> LeaseReport | None:
        lease = self.member.lease
        if lease is None:
            return None
        still_s = now_s - (lease.sent_s + lease.length_s - self._timing.margin_s)
        return LeaseReport(lease.length_s, now_s - lease.sent_s, still_s if still_s >= 0 else None)

    async def run(self) -> None:
        """Take part until `leave` is over, or this is cancelled: then the lease ends by itself."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            watching = tasks.create_task(self._watch())
            while not self._left.is_set():
                self.hear(Tick())
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._left.wait(), TICK_S)
            watching.cancel()

    async def leave(self) -> None:
        """Hand all pools on, and return when that is done; as long as `run` runs."""
        self.hear(Leave())
        await self._left.wait()

    # -- what the member wants --------------------------------------------------------------------

    def _carry_out(self, action: Action) -> None:
        registry, address = self._registry, self.member.address
        match action:
            case Join():
                self._begin(self._join())
            case KeepAlive(lease):
                self._begin(self._keep_alive(lease))
            case TakePool():
                self._begin(self._take(action))
            case ReleasePool(pool, epoch):
                self._begin(self._ask(registry.release(pool, epoch), Released(pool, epoch)))
            case Withdraw(lease):
                self._begin(self._ask(registry.withdraw(address, lease), Withdrawn()))
            case Revoke(lease):
                self._begin(self._ask(registry.revoke(lease), None))
            case Left():
                self._left.set()
            case Serve(pool, epoch):
                self._log.info("pool served", **_named(pool), epoch=epoch)
                self._act(action)
            case Drain(pool, epoch):
                self._act(action)
            case Lost(pool, epoch, to):
                self._log.info("pool handed on", **_named(pool), epoch=epoch, to=to)
                self._act(action)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        if self._tasks is None or self._left.is_set():
            work.close()
        else:
            self._tasks.create_task(work)

    async def _join(self) -> None:
        sent_s = self._clock()
        try:
            entry = await self._registry.join(self.member.address, self._timing.lease_s)
        except RestowError as error:
            self._failed(error)
            self.hear(JoinFailed())
        else:
            self.trouble = None
            self.fleet = entry.fleet
            self._log.info("joined the other brokers", address=self.member.address)
            self.hear(Joined(entry.lease, entry.length_s, sent_s))

    async def _keep_alive(self, lease: int) -> None:
        sent_s = self._clock()
        try:
            length_s = await self._registry.keep_alive(lease)
        except LeaseEndedError as error:
            self._failed(error)
            self.hear(LeaseGone(lease))
        except RestowError as error:
            self._failed(error)
        else:
            self.trouble = None
            stood_still = not self.is_sure()
            self.hear(KeptAlive(lease, length_s, sent_s))
            if stood_still:
                self._changed()

    async def _take(self, action: TakePool) -> None:
        try:
            claim = await self._registry.claim(action.pool, self.member.address, action.lease)
        except LeaseEndedError as error:
            self._failed(error)
            self.hear(LeaseGone(action.lease))
            self.hear(ClaimFailed(action.pool, action.number))
        except RestowError as error:
            self._failed(error)
            self.hear(ClaimFailed(action.pool, action.number))
        else:
            self.hear(Claimed(action.pool, claim, action.number))

    async def _ask(self, call: Coroutine[Any, Any, None], done: Event | None) -> None:
        """Have it done once; the member asks again if it hears nothing."""
        try:
            await call
        except RestowError as error:
            self._failed(error)
        else:
            if done is not None:
                self.hear(done)

    async def _watch(self) -> None:
        while True:
            try:
                async for event in self._registry.watch():
                    self.hear(event)
                    self._changed()
            except RestowError as error:
                self._failed(error)
            await asyncio.sleep(self._timing.retry_s)

    def _failed(self, error: RestowError) -> None:
        """Keep it for who asks, and say it when it is another one than before."""
        if self.trouble is None or self.trouble.reason != error.reason:
            self._log.warning("no word from the other brokers' registry", why=error.message)
        self.trouble = error


def _named(pool: Pool) -> dict[str, str]:
    return {"tenant": pool.tenant, "model": str(pool.model)}
