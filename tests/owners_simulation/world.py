"""Histories of several brokers: who owns what, whatever goes wrong."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from owners_simulation.broker import Broker
from owners_simulation.registry import Registry
from restow.broker.layout.values import ModelIdentity, Pool
from restow.broker.owners.claim import chosen
from restow.broker.owners.events import Idle, Leave, Wanted
from restow.broker.owners.timing import Timing

ADDRESSES = ("x:1", "y:1", "z:1", "w:1")
POOLS = tuple(Pool(tenant, ModelIdentity(model)) for tenant in "ab" for model in ("m", "n"))
FAULTS_S, CALM_S = 20.0, 12.0
ASK_S = 0.3


class Violation(AssertionError):
    """A law is broken."""


@dataclass(slots=True)
class Report:
    """What came of a history."""

    seed: int
    violation: str = ""
    faults: list[str] = field(default_factory=list)
    served: list[tuple[float, str, Pool, int]] = field(default_factory=list)
    granted: int = 0
    refused: int = 0
    longest_without_s: float = 0.0
    """For which a pool that is asked for was nobody's, in the calm."""


class World:
    """A registry, brokers and those who ask for pools, in a time of their own."""

    def __init__(self, seed: int, *, faults: bool = True) -> None:
        self.rng = random.Random(seed)  # noqa: S311 - no secret
        self.report = Report(seed)
        self.timing = Timing()
        self.registry = Registry()
        self.now_s = 0.0
        self.loss, self._slowness = (0.02, 1.0) if faults else (0.0, 1.0)
        self.clients_compare = True
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.brokers: dict[str, Broker] = {}
        self._lives: list[Broker] = []
        self._epochs: dict[Pool, int] = {}
        self._highest_heard: dict[Pool, int] = {}
        self._without_since_s: dict[Pool, float] = {}
        self._faults = faults
        self.calm = False
        self.kinds: tuple[Callable[[], None], ...] = (
            *(self.kill, self.pause, self.cut, self.cut, self.lose_leader, self.stall, self.stall),
            *(self.join, self.join_two, self.leave, self.slow),
        )
        """Of which each fault is one."""

    def run(self) -> Report:
        """The whole history."""
        try:
            self._begin()
            self._run_until(FAULTS_S)
            self._heal()
            self._run_until(FAULTS_S + CALM_S)
            self._check_calm()
        except Violation as violation:
            self.report.violation = f"at {self.now_s:.3f}: {violation}"
        return self.report

    @property
    def faulty(self) -> bool:
        """Whether anything goes wrong now."""
        return self._faults and not self.calm

    # -- time -------------------------------------------------------------------------------------

    def later(self, delay_s: float, work: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now_s + delay_s, next(self._order), work))

    def delay_s(self) -> float:
        """Of a message, one way."""
        return self.rng.uniform(0.0005, 0.02) * self._slowness

    def _run_until(self, end_s: float) -> None:
        while self._heap and self._heap[0][0] <= end_s:
            self.now_s, _, work = heapq.heappop(self._heap)
            work()
        self.now_s = end_s

    # -- who is there -----------------------------------------------------------------------------

    def _begin(self) -> None:
        for address in ADDRESSES[: self.rng.randint(1, 3)]:
            self.start(address)
        self._expire()
        for pool in POOLS:
            self._ask(pool)
        for _ in range(self.rng.randint(1, 8) if self._faults else 0):
            self.later(self.rng.uniform(1.0, FAULTS_S), self._fault)
        for _ in range(0 if self._faults else 4):
            fault = self.rng.choice((self.join, self.leave))
            self.later(self.rng.uniform(3.0, FAULTS_S), partial(self.do, fault))

    def start(self, address: str) -> None:
        broker = Broker(self, address)
        self.brokers[address] = broker
        self._lives.append(broker)

    def _expire(self) -> None:
        self.registry.expire(self.now_s)
        self.later(self.rng.uniform(0.001, 0.05), self._expire)

    def _ask(self, pool: Pool) -> None:
        """A client asks a broker for a pool, and follows where it is sent."""
        running = [one for one in self.brokers.values() if one.runs and not one.left]
        if running:
            asked = self.rng.choice(running)
            to = asked.member.where(pool)
            if to is not None and to in self.brokers and self.brokers[to].runs:
                asked = self.brokers[to]
            asked.hear(Wanted(pool))
            if self.faulty and self.rng.random() < 0.01:
                asked.hear(Idle(pool))
            self._grant(asked, pool)
        self.later(ASK_S * self.rng.random(), lambda: self._ask(pool))

    def _grant(self, broker: Broker, pool: Pool) -> None:
        """What is granted arrives some time after it was decided, or long after."""
        epoch = broker.member.may_grant(pool, broker.now_s())
        if epoch is None:
            return
        late_s = self.rng.choice((0.0, 0.0, 0.0, 8.0)) * self.rng.random() * self.faulty
        self.later(self.delay_s() + late_s, lambda: self._arrive(pool, epoch))

    def _arrive(self, pool: Pool, epoch: int) -> None:
        highest = self._highest_heard.get(pool, 0)
        if epoch < highest and self.clients_compare:
            self.report.refused += 1
            return
        if epoch < highest:
            raise Violation(f"{pool} was granted in epoch {epoch} after epoch {highest}")
        self._highest_heard[pool] = epoch
        self.report.granted += 1

    # -- laws -------------------------------------------------------------------------------------

    def serves(self, broker: Broker, pool: Pool, epoch: int) -> None:
        self.report.served.append((self.now_s, broker.address, pool, epoch))

    def check(self) -> None:
        """At no time do two believe that they may act in one pool, and their epochs rise."""
        running = [one for one in self._lives if one.runs]
        for pool in POOLS:
            owners = [
                (one.address, epoch)
                for one in running
                if (epoch := one.member.may_end(pool, one.now_s())) is not None
            ]
            if len(owners) > 1:
                raise Violation(f"{pool} is owned by {owners}")
            for address, epoch in owners:
                if epoch < self._epochs.get(pool, 0):
                    raise Violation(f"{address} acts in {pool} in epoch {epoch}, an old one")
                self._epochs[pool] = epoch
            self._count_time_without(pool, bool(owners))

    def _count_time_without(self, pool: Pool, owned: bool) -> None:
        if not owned:
            self._without_since_s.setdefault(pool, self.now_s)
            return
        passed_s = self.now_s - self._without_since_s.pop(pool, self.now_s)
        if not self.faulty:
            self.report.longest_without_s = max(self.report.longest_without_s, passed_s)

    def _check_calm(self) -> None:
        there = [one for one in self.brokers.values() if one.runs and not one.left]
        if not there:
            return
        for pool in POOLS:
            should = chosen(pool, [one.address for one in there])
            may = [one.address for one in there if one.member.may_grant(pool, one.now_s())]
            says = {one.member.where(pool) for one in there}
            if may != [should] or says != {should}:
                raise Violation(
                    f"{pool} should be {should}'s: {may} may grant, all say {says}, the registry "
                    f"{self.registry.claims.get(pool)}, {self.registry.members}"
                )

    # -- what goes wrong --------------------------------------------------------------------------

    def _fault(self) -> None:
        self.do(self.rng.choice(self.kinds))

    def do(self, fault: Callable[[], None]) -> None:
        self.report.faults.append(f"{self.now_s:.3f} {fault.__name__}")
        fault()

    def _some(self) -> Broker | None:
        running = [one for one in self.brokers.values() if one.runs and not one.leaving]
        return self.rng.choice(running) if running else None

    def kill(self) -> None:
        broker = self._some()
        if broker is not None:
            broker.alive = False
            delay_s = self.rng.choice((0.1, 5.0)) * self.rng.random()
            self.later(delay_s, lambda: self._start_again(broker))

    def _start_again(self, broker: Broker) -> None:
        if self.brokers[broker.address] is broker:
            self.start(broker.address)

    def pause(self) -> None:
        """Often for longer than its lease."""
        broker = self._some()
        if broker is not None:
            broker.pause()
            self.later(self.rng.choice((0.5, 6.0)) * self.rng.random(), broker.resume)

    def cut(self) -> None:
        """Off the registry alone."""
        broker = self._some()
        if broker is not None:
            broker.cut = True
            self.later(self.rng.choice((1.0, 6.0)) * self.rng.random(), lambda: _mend(broker))

    def lose_leader(self) -> None:
        self.registry.has_leader = False
        self.later(self.rng.choice((1.0, 8.0)) * self.rng.random(), self._find_leader)

    def _find_leader(self) -> None:
        self.registry.find_leader(self.now_s)

    def stall(self) -> None:
        """A broker's watch."""
        broker = self._some()
        if broker is not None:
            broker.watch_stalls_until_s = self.now_s + self.rng.uniform(0.5, 8.0)

    def join(self) -> None:
        for address in ADDRESSES:
            if address not in self.brokers or self.brokers[address].left:
                self.start(address)
                return

    def join_two(self) -> None:
        self.join()
        self.join()

    def leave(self) -> None:
        """One of several: the last one has nobody to hand its pools to."""
        staying = [one for one in self.brokers.values() if one.runs and not one.leaving]
        if len(staying) > 1:
            broker = self.rng.choice(staying)
            broker.leaving = True
            broker.hear(Leave())

    def slow(self) -> None:
        self._slowness = self.rng.choice((10.0, 60.0))
        self.later(3.0 * self.rng.random(), self._fast)

    def _fast(self) -> None:
        self._slowness = 1.0

    def _heal(self) -> None:
        self.calm, self.loss, self._slowness = True, 0.0, 1.0
        if not self.registry.has_leader:
            self._find_leader()
        for broker in self._lives:
            _mend(broker)
            broker.watch_stalls_until_s = 0.0
            if broker.paused:
                broker.resume()
        for broker in list(self.brokers.values()):
            if not broker.alive:
                self._start_again(broker)
        self._without_since_s.clear()


def _mend(broker: Broker) -> None:
    broker.cut = False
