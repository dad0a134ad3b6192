"""A member as a process: with a clock of its own, it may stand still, be killed and be cut off."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from restow.broker.layout.values import Pool
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
from restow.broker.owners.claim import Claim
from restow.broker.owners.events import (
    Claimed,
    ClaimFailed,
    Drained,
    Event,
    Joined,
    JoinFailed,
    KeptAlive,
    LeaseGone,
    Released,
    Tick,
    Withdrawn,
)
from restow.broker.owners.member import Member

if TYPE_CHECKING:
    from owners_simulation.world import World

T = TypeVar("T")
TICK_S = 0.1
CALL_S = 1.0


class Broker:
    """One life of a member."""

    def __init__(self, world: World, address: str) -> None:
        self._world, self._registry, self._rng = world, world.registry, world.rng
        self.address = address
        self.member = Member(address, world.timing)
        self._began_s, self._pace = self._rng.uniform(0, 1e6), self._rng.uniform(0.9, 1.1)
        self.alive, self.paused, self.cut = True, False, False
        self.leaving, self.left = False, False
        self.watch_stalls_until_s = 0.0
        self._waiting = deque[Callable[[], None]]()
        self._watched = -1
        """How much of the registry's history it has heard; -1: nothing."""
        self._on_its_way = False
        self._tick()

    @property
    def runs(self) -> bool:
        return self.alive and not self.paused

    def now_s(self) -> float:
        """By its own clock."""
        return self._began_s + self._world.now_s * self._pace

    def hear(self, event: Event) -> None:
        """Now, or when it goes on."""
        self._run(lambda: self._carry_out(self.member.on(event, self.now_s())))

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        """It goes on where it stood: first with what it believes."""
        self.paused = False
        self._world.check()
        while self._waiting and self.runs:
            self._waiting.popleft()()
            self._world.check()

    def _run(self, work: Callable[[], None]) -> None:
        if self.alive and self.paused:
            self._waiting.append(work)
        elif self.alive:
            work()
            self._world.check()

    def _tick(self) -> None:
        if self.alive and not self.left:
            self.hear(Tick())
            self._run(self._watch)
            self._world.later(TICK_S, self._tick)

    # -- what it wants ----------------------------------------------------------------------------

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Join():
                    self._join()
                case KeepAlive(lease):
                    self._keep_alive(lease)
                case TakePool(pool, lease, number):
                    self._take(pool, lease, number)
                case ReleasePool(pool, epoch):
                    done = Released(pool, epoch)
                    self._ask(partial(self._registry.release, pool, epoch), partial(_said, done))
                case Withdraw(lease):
                    withdraw = partial(self._registry.withdraw, self.address, lease)
                    self._ask(withdraw, partial(_said, Withdrawn()))
                case Revoke(lease):
                    self._ask(partial(self._registry.revoke, lease), partial(_said, None))
                case Serve(pool, epoch):
                    self._world.serves(self, pool, epoch)
                case Drain(pool, epoch):
                    drained = partial(self.hear, Drained(pool, epoch))
                    self._world.later(self._rng.uniform(0, 0.5), drained)
                case Lost():
                    pass
                case Left():
                    self.left = True

    def _join(self) -> None:
        length_s, sent_s = self._world.timing.lease_s, self.now_s()

        def answer(lease: int | None) -> Event:
            return JoinFailed() if lease is None else Joined(lease, length_s, sent_s)

        self._ask(
            lambda: self._registry.join(self.address, length_s, self._world.now_s),
            answer,
            JoinFailed(),
        )

    def _keep_alive(self, lease: int) -> None:
        sent_s = self.now_s()

        def answer(length_s: float | None) -> Event:
            if length_s is None:
                return LeaseGone(lease)
            return KeptAlive(lease, length_s, sent_s)

        self._ask(lambda: self._registry.keep_alive(lease, self._world.now_s), answer)

    def _take(self, pool: Pool, lease: int, number: int) -> None:
        def answer(claim: Claim | None) -> Event:
            return LeaseGone(lease) if claim is None else Claimed(pool, claim, number)

        take = partial(self._registry.claim, pool, self.address, lease)
        self._ask(take, answer, ClaimFailed(pool, number))

    def _ask(
        self,
        do: Callable[[], T],
        answer: Callable[[T], Event | None],
        failed: Event | None = None,
    ) -> None:
        """A call of the registry: done once, twice or not, early or late, and answered or not."""
        world, over = self._world, list[bool]()

        def give_up() -> None:
            if not over and failed is not None:
                self.hear(failed)

        def arrive() -> None:
            if self.cut or not self._registry.has_leader:
                if self._rng.random() < 0.3:  # it waits on its way, and may be done long after
                    world.later(self._rng.uniform(0.1, 4.0), arrive)
                return
            done = do()
            if self._rng.random() > world.loss:
                late_s = world.rng.choice((0.0, 0.0, 0.0, 4.0)) * world.rng.random() * world.faulty
                world.later(world.delay_s() + late_s, lambda: come_back(done))

        def come_back(done: T) -> None:
            """Once at most, and even after it was given up."""
            event = answer(done) if not over and not self.cut and self.alive else None
            if event is not None:
                over.append(True)
                self.hear(event)

        world.later(world.delay_s(), arrive)
        if self._rng.random() < 0.1:  # asked of another member of etcd, too
            world.later(world.delay_s() + self._rng.uniform(0.0, 1.0), arrive)
        world.later(CALL_S, give_up)

    # -- what it sees -----------------------------------------------------------------------------

    def _watch(self) -> None:
        """Hear what has happened, in order, some time after it has; or all there is, anew."""
        world = self._world
        if self._on_its_way or self.cut or world.now_s < self.watch_stalls_until_s:
            return
        if not self._registry.has_leader:
            return
        events: list[Event] = []
        history = self._registry.history
        if self._watched < 0 or self._rng.random() < 0.01:
            events = [self._registry.seen()]
        else:
            events = list(history[self._watched :])
        self._watched = len(history)
        if events:
            self._on_its_way = True
            world.later(world.delay_s(), lambda: self._saw(events))

    def _saw(self, events: list[Event]) -> None:
        self._on_its_way = False
        for event in events:
            self.hear(event)


def _said(event: Event | None, _: None) -> Event | None:
    return event
