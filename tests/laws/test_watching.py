"""A router that counts only what it was told never believes in a state that is not there."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from laws.watched import TENANT, Fleet, Router
from restow.broker.core.common.limits import Limits
from restow.broker.core.prefix import changes, index
from restow.broker.core.prefix.changes import Follower

STEPS = 10_000


class Watcher:
    """A router and how it is told."""

    def __init__(self, fleet: Fleet, haste: float) -> None:
        self.fleet, self.haste = fleet, haste
        self.router = Router()
        self.begun = 0
        self._woken = 0
        self.follower: Follower | None = None
        self.watch()

    def _wake(self) -> None:
        self._woken += 1

    def watch(self) -> None:
        """Begin, or come again after the stream broke."""
        prefixes = self.fleet.prefixes
        if self.follower is not None:
            prefixes.unfollow(TENANT, self._wake)
        self.follower, actions = prefixes.follow(TENANT, self._wake)
        self.fleet.answer(actions)

    def take(self) -> bool:
        """Hear a part, and return whether there may be more."""
        assert self.follower is not None
        part = self.follower.take()
        if part is not None:
            self.begun += part.begins
            self.router.hear(part)
        return part is not None


@pytest.mark.parametrize(
    ("seed", "limits"),
    [
        (1, Limits()),
        (2, Limits()),
        (3, Limits(tenant_max_holdings_bytes=12_000)),
        (4, Limits(tenant_max_holdings_bytes=30_000)),
    ],
)
def test_a_router_believes_exactly_what_the_directory_says_and_engines_hold(
    seed: int, limits: Limits, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Parts of a few changes and a short log: snapshots are read in pieces while engines go on
    # reporting, and slow watchers lose their place.
    monkeypatch.setattr(changes, "PART_BYTES", 1500)
    monkeypatch.setattr(changes, "MAX_CHANGES", 60)
    monkeypatch.setattr(index, "MAX_PLACES", 7)
    random = Random(seed)  # noqa: S311
    fleet = Fleet(random, limits)
    for _ in range(100):
        fleet.step()  # what engines reported before anybody watched
    watchers = [Watcher(fleet, haste) for haste in (2, 0.6, 0.2, 0.02)]
    believed = 0
    for step in range(STEPS):
        fleet.step()
        for watcher in watchers:
            if random.random() < 0.001:
                watcher.watch()
            while random.random() < watcher.haste and watcher.take():
                pass
        if step % 50 == 0:
            fleet.settle()
            for watcher in watchers:
                if watcher.haste < 0.1 and step % 500:
                    continue  # it stays behind
                while watcher.take():
                    pass
                assert watcher.router.current
                for salt, hashes in fleet.prompts():
                    told = watcher.router.believed(salt, hashes)
                    assert told == fleet.found(salt, hashes)
                    for name, tokens in told.items():
                        fleet.check_held(name, salt, hashes, tokens)
                        believed += 1
    fast, *_, slow = watchers
    assert slow.begun > fast.begun > 1, "the slow watcher lost its place, and both came again"
    assert believed > 1000


def test_a_log_that_nobody_watches_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, wakes = Fleet(Random(5)), list[Any]()  # noqa: S311
    for _ in range(50):
        fleet.step()
    assert not fleet.prefixes.logs
    assert not any(
        segment.hashes
        for held in fleet.prefixes.holders.values()
        for segment in held.index.segments()
    )
    _, actions = fleet.prefixes.follow(TENANT, lambda: wakes.append(1))
    fleet.answer(actions)
    assert actions
    assert wakes
    assert list(fleet.prefixes.logs) == [TENANT]


def test_the_last_follower_of_a_tenant_without_holdings_takes_the_log_along() -> None:
    fleet = Fleet(Random(6))  # noqa: S311

    def wake() -> None:
        pass

    follower, _ = fleet.prefixes.follow("nobody", wake)
    part = follower.take()
    assert part is not None
    assert (part.begins, part.changes, part.current) == (True, [], True)
    assert follower.take() is None
    fleet.prefixes.unfollow("nobody", wake)
    assert not fleet.prefixes.logs
