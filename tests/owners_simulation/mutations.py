"""Laws of ownership taken out, each by its name: histories must find that they are missing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest.mock import patch

from owners_simulation.world import World
from restow.broker.layout.values import Pool
from restow.broker.owners.actions import Action
from restow.broker.owners.events import Event, KeptAlive
from restow.broker.owners.held import Held
from restow.broker.owners.member import Member
from restow.broker.owners.timing import Lease
from restow.broker.owners.tries import Tries

Mutation = Callable[[World], contextlib.AbstractContextManager[object]]


def no_margin(world: World) -> contextlib.AbstractContextManager[object]:
    """A member acts until the very end of its lease, by its own clock."""
    may_act = Lease.may_act
    # Where it matters: others see at once what a broker that is cut off does not.
    world.kinds = (world.cut,)
    return patch.object(Lease, "may_act", lambda self, now_s, margin_s: may_act(self, now_s, 0.0))


def no_end_of_leases(world: World) -> contextlib.AbstractContextManager[object]:
    """A member acts until it is told that its lease has ended."""
    return patch.object(Lease, "may_act", lambda *how: True)


def counted_from_answers(world: World) -> contextlib.AbstractContextManager[object]:
    """A lease is counted from when its answer is read, and not from when it was asked for."""
    on = Member.on

    def hasty(self: Member, event: Event, now_s: float) -> list[Action]:
        return on(
            self, replace(event, sent_s=now_s) if isinstance(event, KeptAlive) else event, now_s
        )

    # Where it matters: the answer lies there while a broker stands still.
    world.kinds = (world.pause,)
    return patch.object(Member, "on", hasty)


@contextlib.contextmanager
def ownership_from_the_watch(world: World) -> Iterator[None]:
    """A pool is ours if the watch says so, which may be old."""

    def may_end(self: Member, pool: Pool, now_s: float) -> int | None:
        claim = self.view.claims.get(pool)
        if self.lease is None or claim is None or claim.lease != self.lease.number:
            return None
        return claim.epoch if self.lease.may_act(now_s, 0.5) else None

    with patch.object(Member, "may_end", may_end):
        yield


@contextlib.contextmanager
def epochs_not_compared_in_the_registry(world: World) -> Iterator[None]:
    """A release deletes whoever's claim is there, and a claim is written over another one."""
    world.registry.compares_epochs = False
    yield


@contextlib.contextmanager
def epochs_not_compared_by_clients(world: World) -> Iterator[None]:
    """Who has heard of an epoch takes orders of an earlier one."""
    world.clients_compare = False
    yield


def late_answers_count(world: World) -> contextlib.AbstractContextManager[object]:
    """An answer counts that came to an earlier try than the one under way, or to none."""
    return patch.object(Tries, "is_under_way", lambda *which: True)


@contextlib.contextmanager
def acting_while_releasing(world: World) -> Iterator[None]:
    """A member acts in a pool until it hears that it is released."""

    def may_end(self: Member, pool: Pool, now_s: float) -> int | None:
        held: Held | None = self.held.get(pool)
        if held is None or self.lease is None or not self.lease.may_act(now_s, 0.5):
            return None
        return held.epoch

    with patch.object(Member, "may_end", may_end):
        yield


MUTATIONS: dict[str, Mutation] = {
    "margin": no_margin,
    "lease": no_end_of_leases,
    "answers": counted_from_answers,
    "watch": ownership_from_the_watch,
    "registry": epochs_not_compared_in_the_registry,
    "clients": epochs_not_compared_by_clients,
    "late": late_answers_count,
    "releasing": acting_while_releasing,
}
