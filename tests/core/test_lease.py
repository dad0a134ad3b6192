"""The times of one handoff: leases, grants and waits, to the moment at which each ends."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from core.test_offers import asking, holder
from core.world import World, p_and_d
from restow.broker.core.common.limits import Limits
from restow.broker.core.handoffs.lease import Lease

LIMITS = Limits(grant_s=10.0, min_grant_s=0.5, lease_margin_s=1.0, settle_grace_s=4.0)
NOW_S = 100.0


def lease(lease_s: float = 60.0, timeout_s: float = 60.0) -> Lease:
    made = Lease()
    made.renew(lease_s, NOW_S)
    made.ask(timeout_s, NOW_S)
    return made


@pytest.mark.parametrize(
    ("lease_s", "timeout_s", "granted_s", "reason"),
    [
        (60.0, 60.0, 10.0, ""),
        (5.0, 60.0, 4.0, ""),  # until a margin before the lease ends
        (60.0, 5.0, 5.0, ""),
        (1.5, 60.0, 0.5, ""),
        (1.4, 60.0, 0.0, "LEASE_TOO_SHORT"),
        (1.4, 0.1, 0.0, "LEASE_TOO_SHORT"),
        (1.5, 0.4, 0.0, "TIMEOUT_TOO_SHORT"),
        (60.0, 0.5, 0.5, ""),
        (60.0, 0.4, 0.0, "TIMEOUT_TOO_SHORT"),
    ],
)
def test_a_grant_ends_before_the_lease_and_the_demand(
    lease_s: float, timeout_s: float, granted_s: float, reason: str
) -> None:
    times = lease(lease_s, timeout_s)
    failure = times.grant(LIMITS, NOW_S)
    assert ("" if failure is None else failure.reason) == reason
    if failure is None:
        assert times.grant_until_s == NOW_S + granted_s
        assert times.settle_until_s == times.next_look_s() == NOW_S + granted_s + 4.0
        assert times.left_ms(NOW_S) == 1000 * granted_s
        assert not list(times.wrong(NOW_S - 1.0))
        times.revoke()
    assert times.grant_until_s == times.settle_until_s == 0.0


def test_an_order_needs_time_and_a_read_may_end_a_margin_after_its_grant() -> None:
    times = lease()
    assert times.grant(LIMITS, NOW_S) is None
    assert times.used_up(LIMITS, NOW_S + 9.5) is None
    assert times.used_up(LIMITS, NOW_S + 9.6) is not None
    assert times.left_ms(NOW_S + 10.0) == times.left_ms(NOW_S + 11.0) == 1
    assert times.outlived(LIMITS, NOW_S + 11.0) is None
    assert times.outlived(LIMITS, NOW_S + 11.1) is not None


def test_a_slow_read_doubles_the_next_grant_of_this_demand_alone() -> None:
    times = lease()
    assert times.reads_again(LIMITS, NOW_S)
    assert times.grant(LIMITS, NOW_S) is None
    assert times.grant_until_s == NOW_S + 20.0
    times.ask(0.4, NOW_S)
    failure = times.grant(LIMITS, NOW_S)
    assert failure is not None
    assert failure.reason == "READ_DEADLINE"
    times.forget_demand()
    times.ask(60.0, NOW_S)
    assert times.grant(LIMITS, NOW_S) is None
    assert times.grant_until_s == NOW_S + 10.0


def test_a_grant_that_is_not_inside_its_lease_is_found() -> None:
    for grant_s, settle_s, faults in (
        (10.0, 14.0, 0),
        (10.0, 0.0, 0),  # reports have no deadline
        (0.0, 14.0, 1),
        (14.0, 14.0, 1),
        (60.0, 64.0, 1),
        (70.0, 70.0, 2),
    ):
        times = lease()
        times.grant_until_s = NOW_S + grant_s
        times.settle_until_s = settle_s and NOW_S + settle_s
        assert len(list(times.wrong(NOW_S))) == faults


def test_a_wait_begins_once_and_ends_with_what_it_waited_for() -> None:
    times = Lease()
    times.renew(60.0, NOW_S)
    waits: list[tuple[Callable[[Limits, float], bool], Callable[[], None], str, float]] = [
        (times.wait_for_demand, lambda: times.ask(50.0, NOW_S), "unasked_until_s", 30.0),
        (times.wait_for_agents, times.agents_came, "agents_until_s", 10.0),
    ]
    for begin, end, until, wait_s in waits:
        assert begin(LIMITS, NOW_S)
        assert not begin(LIMITS, NOW_S + 1.0)
        assert getattr(times, until) == times.next_look_s() == NOW_S + wait_s
        end()
        assert getattr(times, until) == 0.0
        assert begin(LIMITS, NOW_S + 1.0)
        end()
    times.renew(1.0, NOW_S)
    assert times.next_look_s() == NOW_S + 50.0
    times.forget_demand()
    assert times.next_look_s() == NOW_S + 60.0


def said(world: World) -> str:
    return world.directory.granting.waits_for(world.find())


def test_what_a_handoff_waits_for_is_said() -> None:
    world, p, d = p_and_d()
    world.request(d)
    assert said(world) == "nobody published it"
    world.publish(p, blocks={}, final=False)
    assert said(world) == "engine p has not published all of it"
    world.publish(p)
    assert said(world) == "ranks [0] of engine p have not fenced it"
    world.fence(p)
    assert said(world) == ""
    world = World()
    world.plans_at_once = False
    p, d = world.engine("p"), world.engine("d")
    world.ready(p)
    world.request(d)
    assert said(world) == "the plan is not ready"
    world = World()
    holder(world, "holder")
    asking(world)
    assert said(world) == "engine holder has not answered the offer"
    world, p, d = p_and_d()
    world.ready(p)
    assert said(world) == "nobody asked for it"
