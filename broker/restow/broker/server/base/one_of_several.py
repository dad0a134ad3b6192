"""A broker among others: it leads, or stands by and says who does.

It keeps its lease alive in one task, and asks the registry who leads in another task. When it
begins to lead, its directory is empty, and engines and agents report again what is open. When it
stops leading, it forgets everything, and sends engines and agents to the leader.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from restow.broker.errors import (
    AddressInvalidError,
    ExtraMissingError,
    NoLeaderError,
    NotLeaderError,
    RestowError,
)
from restow.broker.logs import get_logger
from restow.broker.registry.leadership import Leadership, Want
from restow.broker.registry.registry import LeaseEndedError, Registry, Timing
from restow.broker.server.base.hub import Hub
from restow.broker.server.base.settings import BrokerSettings
from restow.broker.server.base.standing import LEADER_WAIT_S, FleetReport, Standing

TICK_S = 0.05
WARNINGS_EVERY_S = 10.0
"""How often the registry is asked for warnings about itself."""
DRAIN_S = 1.0
"""How long reads under way may hold up a leader that leaves."""
SUCCESSOR_S = 1.0
"""How long a leader that has left looks for the next leader, so that it can send engines there."""
EVERYWHERE = ("0.0.0.0", "::", "")  # noqa: S104 - nothing listens here


def seconds_awake_or_not() -> float:
    """Return a time that goes on while the host sleeps, as the registry's time does."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class OneOfSeveral(Standing):
    """The standing of a broker among others. `run` it; call all methods on the same loop."""

    among_others = True

    def __init__(
        self,
        registry: Registry,
        address: str,
        hub: Hub,
        *,
        fleet: str = "default",
        timing: Timing | None = None,
        expected: int = 0,
        clock: Callable[[], float] = seconds_awake_or_not,
        warnings: Callable[[], Coroutine[Any, Any, tuple[str, ...]]] | None = None,
    ) -> None:
        """Prepare. Engines reach this broker at ``address``; ``expected`` brokers should be there.

        ``warnings`` asks the registry for warnings about itself.
        """
        self.fleet = fleet
        self.leadership = Leadership(address, timing or Timing())
        self.term = 0
        self._terms = 0
        self._registry, self._hub, self._clock = registry, hub, clock
        self._expected, self._ask_warnings = expected, warnings
        self._warnings: tuple[str, ...] = ()
        self._leaderless_since_s: float | None = clock()
        self._trouble: RestowError | None = None
        self._news = asyncio.Event()
        self._joined = False
        self._left = asyncio.Event()
        self.running: asyncio.Task[None] | None = None
        """`run`, while the broker takes part."""
        self._log = get_logger("restow.brokers")

    # -- questions of services --------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch in which the broker leads; 0: it does not lead."""
        return self.leadership.epoch

    def report(self) -> FleetReport:
        """Return the broker's standing now, and what it knows of the other brokers."""
        now_s = self._clock()
        since_s = self._leaderless_since_s
        return FleetReport(
            self.leadership,
            self.fleet,
            now_s,
            self._expected,
            0.0 if since_s is None else now_s - since_s,
            self._trouble,
            self._warnings,
            self._terms,
        )

    def check(self) -> None:
        """Raise `NotLeaderError` or `NoLeaderError` unless the broker leads."""
        if not self.term:
            raise self._elsewhere()

    def _elsewhere(self) -> RestowError:
        own, leader = self.leadership.address, self.leadership.leader
        if leader and leader != own:
            return NotLeaderError(
                f"the broker at {own} stands by: ask the leader at {leader}", leader=leader
            )
        why = "" if self._trouble is None else f" ({self._trouble.message})"
        return NoLeaderError(
            f"no broker of fleet {self.fleet} leads at the moment, as far as the broker at {own} "
            f"knows: ask again{why}"
        )

    async def lead(self, unreached: str = "", within_s: float = LEADER_WAIT_S) -> None:
        """Wait while nobody leads. Raise as `check` does."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while not self.term and self.leadership.leader in ("", unreached):
                    news = self._news
                    await news.wait()
        self.check()

    def name_epoch(self, epoch: int) -> None:
        """Take an epoch that an engine or agent names: the broker leads in no lower epoch."""
        self.leadership.named(epoch)

    def is_sure(self) -> bool:
        """Return whether no other broker can lead now, or this broker does not lead.

        A leader that leaves is not sure until it has sent engines and agents on.
        """
        return not self.term or self.leadership.may_act(self._clock())

    async def sure(self) -> None:
        """Wait until `is_sure`."""
        while not self.is_sure():
            await self._news.wait()

    # -- taking part ------------------------------------------------------------------------------

    async def run(self) -> None:
        """Take part until `leave` is over or this is cancelled: then the lease ends by itself."""
        works = (self._keep(), self._follow(), self._watch_registry())
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(work) for work in works]
            await self._left.wait()
            for task in running:
                task.cancel()

    async def leave(self) -> None:
        """End what is under way, have another broker lead, and send engines to it."""
        leads = bool(self.term)
        if leads:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DRAIN_S):
                    await self._hub.drain()
                    await self._until(self._hub.all_said)
        self.leadership.leave()
        # `_follow` gives the leadership up.
        await self._until(lambda: self.leadership.want(self._clock()) is not Want.RELEASE)
        if leads:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SUCCESSOR_S):
                    while not self.leadership.leader:
                        await self._news.wait()
            self._stop()
        self._left.set()
        with contextlib.suppress(RestowError):
            await self._registry.leave()

    async def _until(self, holds: Callable[[], bool]) -> None:
        """Return when ``holds`` returns True."""
        while not holds():  # noqa: ASYNC110 - the outboxes know no event for it
            await asyncio.sleep(TICK_S / 5)

    async def _keep(self) -> None:
        """Keep the broker's lease alive."""
        timing = self.leadership.timing
        while True:
            sent_s = self._clock()
            pause_s = timing.keep_alive_every_s
            try:
                if self._joined:
                    length_s = await self._registry.keep_alive()
                else:
                    address = self.leadership.address
                    length_s = await self._registry.join(address, timing.lease_s)
                    self._log.info("joined the other brokers", address=address, fleet=self.fleet)
            except LeaseEndedError as error:
                self._failed(error)
                self._joined, pause_s = False, 0.0
                self.leadership.lost()
                self._look_at_it()
            except RestowError as error:
                self._failed(error)
                pause_s = min(pause_s, timing.retry_s)
            else:
                self._joined = True
                stood_still = not self.is_sure()
                self.leadership.kept(sent_s, length_s)
                if stood_still:
                    self._tell_news()
            await asyncio.sleep(pause_s)

    async def _follow(self) -> None:
        """Ask who leads, and lead when nobody does."""
        retry_s = self.leadership.timing.retry_s
        while True:
            pause_s = self._registry.look_every_s
            try:
                self.leadership.saw(await self._registry.look())
                self._look_at_it()  # before it leads again: another broker may have led meanwhile
                await self._do(self.leadership.want(self._clock()))
            except LeaseEndedError as error:
                self._failed(error)
                self._joined = False
                self.leadership.lost()
            except RestowError as error:
                self._failed(error)
                pause_s = max(pause_s, retry_s)
            else:
                self._trouble = None
            self._look_at_it()
            await asyncio.sleep(pause_s)

    async def _do(self, want: Want) -> None:
        leadership, registry = self.leadership, self._registry
        match want:
            case Want.LEAD:
                leadership.led(await registry.lead(leadership.named_epoch))
            case Want.RAISE:
                named = leadership.named_epoch
                self._log.warning(
                    "an engine or agent knows a higher epoch: was the registry restored?",
                    epoch=leadership.epoch,
                    named=named,
                )
                leadership.led(await registry.raise_epoch(named))
            case Want.RELEASE:
                await registry.release()
                leadership.released()
            case Want.NOTHING:
                pass

    async def _watch_registry(self) -> None:
        """Notice when the lease should have ended, and what the registry warns of."""
        asked_s = float("-inf")
        while True:
            now_s = self._clock()
            self.leadership.tick(now_s)
            self._look_at_it()
            if self._ask_warnings is not None and now_s - asked_s >= WARNINGS_EVERY_S:
                asked_s = now_s
                with contextlib.suppress(RestowError):
                    self._warnings = await self._ask_warnings()
            await asyncio.sleep(TICK_S)

    def _look_at_it(self) -> None:
        """Begin to lead or stop leading, as the leadership says now."""
        leadership = self.leadership
        leads = bool(leadership.epoch)
        if leads and not self.term:
            self._terms += 1
            self.term = self._terms
            self._log.info("leads", epoch=leadership.epoch, fleet=self.fleet)
        elif not leads and self.term and not self.leadership.leaving:
            self._stop()
        known = leads or bool(leadership.leader)
        if known:
            self._leaderless_since_s = None
        elif self._leaderless_since_s is None:
            self._leaderless_since_s = self._clock()
        self._tell_news()

    def _stop(self) -> None:
        """Stop leading: forget everything, and send engines and agents on."""
        if not self.term:
            return
        self.term = 0
        error = self._elsewhere()
        self._log.info("leads no longer", why=error.message, fleet=self.fleet)
        hub = self._hub
        hub.perform(hub.directory.members.hand_on(error, hub.now_s()))
        hub.forget_commands()
        self._tell_news()

    def _tell_news(self) -> None:
        """Wake all that wait, so that they look again."""
        news, self._news = self._news, asyncio.Event()
        news.set()
        self._hub.expected.look_again()

    def _failed(self, error: RestowError) -> None:
        if self._trouble is None or self._trouble.reason != error.reason:
            self._log.warning("the registry failed", reason=error.reason, detail=error.message)
        self._trouble = error


@contextlib.asynccontextmanager
async def in_fleet(
    settings: BrokerSettings, address: str, hub: Hub
) -> AsyncIterator[OneOfSeveral | None]:
    """Have ``hub`` be one of several brokers inside the ``async with``; None: the only broker.

    It is reached at ``address`` if the settings advertise nothing else. A registry that does not
    answer is asked again until it does. Raises the errors of settings, and of a registry that
    refuses or is too old.
    """
    if settings.etcd is None and settings.kubernetes_leases is None:
        yield None
        return
    advertised = checked_advertised(settings.advertise or address)
    async with contextlib.AsyncExitStack() as stack:
        registry, warnings = await _opened(settings, stack)
        broker = OneOfSeveral(
            registry,
            advertised,
            hub,
            fleet=settings.fleet,
            timing=settings.timing(),
            expected=settings.expect_brokers,
            warnings=warnings,
        )
        hub.standing = broker
        broker.running = running = asyncio.create_task(broker.run())
        try:
            yield broker
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def _opened(
    settings: BrokerSettings, stack: contextlib.AsyncExitStack
) -> tuple[Registry, Callable[[], Coroutine[Any, Any, tuple[str, ...]]] | None]:
    """Return the registry that the settings name, and the function that asks for its warnings."""
    timing, log = settings.timing(), get_logger("restow.brokers")
    if settings.kubernetes_leases is not None:
        try:
            from restow.broker.registry.kubernetes import (
                KubernetesRegistry,
                KubernetesUnreachableError,
            )
        except ModuleNotFoundError as error:
            raise ExtraMissingError(
                f"--kubernetes-leases needs {error.name}, which is not installed here: "
                f"pip install 'restow[kubernetes]'",
                module=error.name or "",
            ) from None
        leases = KubernetesRegistry(
            settings.kubernetes_leases,
            settings.fleet,
            seconds_awake_or_not,
            account=settings.kubernetes_account,
            call_s=timing.lease_s / 2,
        )
        stack.push_async_callback(leases.close)
        try:
            await leases.look()
        except KubernetesUnreachableError as error:
            log.warning("Kubernetes does not answer yet", why=error.message)
        return leases, None
    from restow.broker.registry.etcd import EtcdRegistry
    from restow.broker.registry.etcd_access import EtcdUnreachableError
    from restow.broker.registry.etcd_client import EtcdClient, patience_for

    client = EtcdClient(settings.etcd_access(), patience_for(timing))
    stack.push_async_callback(client.close)
    try:
        await client.statuses()
    except EtcdUnreachableError as error:
        log.warning("etcd does not answer yet", why=error.message)
    return EtcdRegistry(client, settings.fleet), client.warnings


def checked_advertised(address: str) -> str:
    """Return where clients reach this broker. Raise `AddressInvalidError` if nobody could."""
    if address.rpartition(":")[0].strip("[]") in EVERYWHERE:
        raise AddressInvalidError(
            f"each of several brokers tells clients its address, but clients cannot reach "
            f"{address}: give --advertise HOST:PORT",
            address=address,
        )
    return address
