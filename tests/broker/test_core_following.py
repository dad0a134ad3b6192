"""Runs that are read while they are gathered: only by who can, and never after they broke."""

from __future__ import annotations

import pytest

from broker.test_core_staging import reading, unstaged
from broker.world import Side, World, ends
from restow.broker.core import actions as act
from restow.broker.core.actions import Progress, State
from restow.broker.core.digests import DigestMode, Digests

PROGRESS = Progress(4096, 64)


def following(
    *follows: bool, digests: Digests | None = None, hosts: tuple[str, str] = ("here", "here")
) -> tuple[World, Side, Side, int]:
    """A handoff to ranks of D of which some can follow."""
    world = World(staged=True, digests=digests, together=True)
    d = world.engine("d", len(follows), agents=False)
    for rank, can in enumerate(follows):
        world.connect(d, rank, follows=can, host=hosts[1])
    p = world.engine("p", host=hosts[0])
    world.publish(p)
    world.fence_all(p)
    world.request(d)
    return world, p, d, world.find().number


def orders_to_gather(world: World) -> list[act.SendStage]:
    return [one for one in world.sent if isinstance(one, act.SendStage)]


@pytest.mark.parametrize("follows", [(True,), (True, True), (True, False), (False, False)])
def test_a_source_is_told_whether_all_who_read_can_follow(follows: tuple[bool, ...]) -> None:
    world, *_ = following(*follows)
    (order,) = orders_to_gather(world)
    assert order.followed == all(follows)


@pytest.mark.parametrize("hosts", [("here", "there"), ("", ""), ("here", "")])
def test_between_hosts_a_run_is_gathered_first(hosts: tuple[str, str]) -> None:
    world, *_ = following(True, hosts=hosts)
    (order,) = orders_to_gather(world)
    assert not order.followed


def test_what_is_hashed_is_complete() -> None:
    world, p, d, number = following(True, digests=Digests(DigestMode.ALL))
    (order,) = orders_to_gather(world)
    assert (order.hashed, order.followed) == (True, False)
    world.stage(p, number, progress=PROGRESS)
    assert not world.orders(act.SendExecute)
    assert ends(p) == ends(d) == [("FAILED", "ARGUMENT_INVALID")]


def test_the_reader_is_told_where_the_count_is() -> None:
    world, p, d, number = following(True)
    execute = world.stage(p, number, progress=PROGRESS)[-1]
    assert isinstance(execute, act.SendExecute)
    assert [run.progress for run in execute.sources] == [PROGRESS]
    assert world.find().state is State.READING
    world.settle(d, number)
    assert ends(p) == ends(d) == [("DONE", "")]
    assert unstaged(world) == [0]


def test_who_can_not_follow_is_not_told_to_read_what_is_not_there() -> None:
    world, p, d, number = following(False)
    world.stage(p, number, progress=PROGRESS)
    assert not world.orders(act.SendExecute)
    assert ends(p) == ends(d) == [("FAILED", "ARGUMENT_INVALID")]
    failure = world.find().failure
    assert failure is not None
    assert "can't follow" in failure.detail
    assert unstaged(world) == [0]  # it is there, though nobody may read it


@pytest.mark.parametrize(
    "progress", [Progress(0, 64), Progress(-1, 64), Progress(1 << 63, 64), Progress(4096, 0)]
)
def test_a_count_that_can_be_nowhere_fails_the_handoff(progress: Progress) -> None:
    world, p, d, number = following(True)
    world.stage(p, number, progress=progress)
    assert not world.orders(act.SendExecute)
    assert ends(p) == ends(d) == [("FAILED", "ARGUMENT_INVALID")]


def test_a_source_that_breaks_midway_gives_the_reason() -> None:
    world, p, d, number = following(True)
    world.stage(p, number, progress=PROGRESS)
    world.stage(p, number, reason="COPY_FAILED")
    assert ends(d) == [], "the rank may still write"
    world.settle(d, number, reason="READ_FAILED")
    assert ends(p) == ends(d) == [("FAILED", "COPY_FAILED")]
    assert unstaged(world) == [0]


def test_a_reader_that_saw_nothing_of_the_break_has_read_in_vain() -> None:
    world, p, d, number = following(True)
    world.stage(p, number, progress=PROGRESS)
    world.stage(p, number, reason="COPY_FAILED")
    world.settle(d, number)
    assert ends(p) == ends(d) == [("FAILED", "COPY_FAILED")]


def test_a_complete_run_can_not_break_any_more() -> None:
    world = World(staged=True)
    p, d, number = reading(world, 1, 1)
    world.stage(p, number)
    assert world.stage(p, number, reason="COPY_FAILED") == []
    world.settle(d, number)
    assert ends(p) == ends(d) == [("DONE", "")]
