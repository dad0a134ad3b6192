"""Leases, grants and patience: nothing happens late, and nobody waits for ever."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from core.world import World, alone, ends, kinds, p_and_d, reading
from restow.broker.core.common import actions as act
from restow.broker.core.common.keys import State
from restow.broker.core.common.limits import Limits
from restow.broker.core.engines.flow import LEAST_SMALL_READS
from restow.broker.core.ledger.handoff_table import Deadlines
from restow.broker.errors import HandoffUnknownError


def test_nobody_publishes() -> None:
    world, d = alone("d")
    world.request(d, timeout_s=5)
    assert world.wait(4.9) == []
    world.wait(0.2)
    assert ends(d) == [("EXPIRED", "NOT_PUBLISHED")]
    assert "nobody published it" in d.told[0].detail


def test_a_rank_that_never_fences_is_named() -> None:
    world, p, d = p_and_d(2)
    world.publish(p)
    world.fence(p, 1)
    world.request(d, timeout_s=5)
    world.wait(5.1)
    assert ends(p) == ends(d) == [("EXPIRED", "NOT_PUBLISHED")]
    assert "ranks [0] of engine p" in d.told[0].detail


@pytest.mark.parametrize(
    ("why", "reason"),
    [
        ("plan", "PLAN_LATE"),
        ("drain", "BROKER_DRAINING"),
        ("agent", "AGENT_MISSING"),
    ],
)
def test_d_whose_patience_ends_hears_what_the_broker_was_waiting_for(why: str, reason: str) -> None:
    world, p, d = p_and_d()
    world.plans_at_once = why != "plan"
    world.drain(why == "drain")
    if why == "agent":
        world.disconnect(d, 0)
    world.ready(p)
    world.request(d, timeout_s=1.0)
    world.wait(1.1)
    assert ends(d) == [("EXPIRED", reason)]
    assert ends(p) == ([] if why == "agent" else [("EXPIRED", reason)])


def test_nobody_asks_or_d_asks_after_the_lease() -> None:
    world, p, d = p_and_d()
    world.ready(p, lease_s=10.0)
    assert world.wait(9.9) == []
    world.wait(0.2)
    assert ends(p) == [("EXPIRED", "LEASE_EXPIRED")]
    assert "nobody asked" in p.told[0].detail
    world.request(d)
    assert ends(d) == [("EXPIRED", "LEASE_EXPIRED")]
    assert not world.orders(act.SendExecute)


def test_a_renewed_lease_lasts_longer_and_never_shorter() -> None:
    world, p = alone("p")
    world.ready(p, lease_s=10.0)
    world.wait(8)
    world.renew(p, lease_s=10)
    world.renew(p, lease_s=1)
    world.publish(p, lease_s=1)
    assert world.wait(9.9) == []
    world.wait(0.2)
    assert ends(p) == [("EXPIRED", "LEASE_EXPIRED")]
    # A renewal that comes too late hears of the end, and changes nothing.
    assert kinds(world.renew(p)) == ["TellEnded"]


def test_a_fence_before_the_publication_makes_no_lease_longer() -> None:
    world, p, d = p_and_d()
    world.fence(p)
    world.publish(p, lease_s=2.0)
    assert world.find().lease.until_s == world.now_s + 2
    world.request(d)
    assert world.find().lease.grant_until_s < world.now_s + 2


def test_a_fence_of_what_is_never_published_is_no_handoff_and_is_forgotten() -> None:
    world, p = alone("p")
    world.fence(p)
    assert not world.directory.ledger.live
    assert len(p.record.unpublished_fences) == 1
    world.wait(31)
    assert len(p.record.unpublished_fences) == 0
    assert world.orders(act.SendUnfence) == [act.SendUnfence(p.agents[0].key, "h")]
    world.publish(p)
    assert world.find().state is State.WAITING


@pytest.mark.parametrize(
    ("lease_s", "timeout_s", "reason"),
    [(0.14, 30.0, "LEASE_TOO_SHORT"), (30.0, 0.01, "TIMEOUT_TOO_SHORT")],
)
def test_a_time_too_short_for_a_read_is_not_granted(
    lease_s: float, timeout_s: float, reason: str
) -> None:
    world, p, d = p_and_d()
    world.ready(p, lease_s=lease_s)
    world.request(d, timeout_s=timeout_s)
    assert ends(p) == ends(d) == [("EXPIRED", reason)]
    assert not world.orders(act.SendExecute)


@pytest.mark.parametrize(
    ("lease_s", "timeout_s", "grant_s"), [(30, 30, 10), (3, 30, 2.9), (30, 2, 2)]
)
def test_the_grant_ends_before_the_lease_and_before_ds_patience(
    lease_s: float, timeout_s: float, grant_s: float
) -> None:
    world, p, d = p_and_d()
    world.ready(p, lease_s=lease_s)
    world.request(d, timeout_s=timeout_s)
    handoff = world.find()
    assert handoff.lease.grant_until_s - world.now_s == pytest.approx(grant_s)
    assert handoff.lease.grant_until_s < handoff.lease.until_s


def test_a_read_that_outlasts_its_grant_is_repeated_with_twice_the_time_while_any_is_left() -> None:
    world, p, d = p_and_d(1, 2)
    world.ready(p, lease_s=600)
    world.request(d, timeout_s=65.0)
    granted_s = []
    while not ends(d):
        handoff = world.find()
        granted_s.append(handoff.lease.grant_until_s - world.now_s)
        world.wait(granted_s[-1])
        world.settle(d, handoff.number, 1, reason="READ_DEADLINE")
        assert world.find().number == handoff.number, "rank 0 may still write"
        world.settle(d, handoff.number, 0)
        world.wait(0.02)
    assert granted_s == pytest.approx([10, 20, 35], abs=0.1)
    assert ends(p) == ends(d) == [("FAILED", "READ_DEADLINE")]


def test_a_read_that_was_slow_once_may_end_well() -> None:
    world, p, d, number = reading()
    world.settle(d, number, reason="READ_DEADLINE")
    world.wait(0.02)
    world.settle(d, world.find().number)
    assert ends(p) == ends(d) == [("DONE", "")]


def test_ranks_that_never_settle_end_the_handoff_when_ds_timeout_ends() -> None:
    world, p, d = p_and_d(1, 2)
    world.ready(p, lease_s=600)
    world.request(d, timeout_s=30.0)
    handoff = world.find()
    world.settle(d, handoff.number, 0)
    assert world.wait(29.9) == []
    world.wait(0.2)
    assert ends(p) == [("FAILED", "READ_DEADLINE")]
    assert ends(d) == []
    world.settle(d, handoff.number, 1)
    assert ends(p) == ends(d) == [("FAILED", "READ_DEADLINE")]
    assert "ranks [1]" in d.told[0].detail
    assert world.settle(d, handoff.number, 1) == []


def test_a_rank_that_settles_long_after_its_grant_may_read_again() -> None:
    world, p, d = p_and_d(1, 2)
    world.ready(p, lease_s=600)
    world.request(d, timeout_s=30.0)
    handoff = world.find()
    number = handoff.number
    world.settle(d, number, 0)
    world.wait(20.0)
    assert (handoff.number, handoff.given_back) == (number, True)
    world.settle(d, number, 1)
    world.wait(0.02)
    assert handoff.number != number
    world.settle(d, handoff.number, 0)
    world.settle(d, handoff.number, 1)
    assert ends(p) == ends(d) == [("DONE", "")]


def test_what_was_read_when_the_grant_was_over_is_read_again_even_before_the_tick() -> None:
    world, p, d, number = reading()
    world.now_s = world.find().lease.grant_until_s + world.directory.limits.lease_margin_s + 0.01
    world.settle(d, number)
    assert ends(d) == []
    world.wait(0.02)
    assert world.find().number != number
    world.settle(d, world.find().number)
    assert ends(p) == ends(d) == [("DONE", "")]


def test_an_agent_that_reports_its_deadline_at_once_reads_seven_times_and_no_more() -> None:
    world, p, d = p_and_d()
    world.ready(p, lease_s=600)
    world.request(d, timeout_s=600.0)
    reads = 0
    while not ends(d):
        world.settle(d, world.find().number, reason="READ_DEADLINE")
        world.wait(0.02)
        reads += 1
    assert (reads, ends(d)) == (7, [("FAILED", "READ_DEADLINE")])


def test_a_lease_that_is_renewed_during_the_read_does_not_prolong_the_grant() -> None:
    world, p, d = p_and_d()
    world.ready(p, lease_s=3.0)
    world.request(d)
    world.renew(p, lease_s=60)
    handoff, number = world.find(), world.find().number
    world.wait(3.5)
    assert handoff.given_back
    world.settle(d, number)
    world.wait(0.02)
    assert handoff.number != number
    assert ends(p) == []


def test_missing_agents_are_waited_for() -> None:
    world = World()
    p, d = world.engine("p"), world.engine("d", 2, agents=False)
    world.ready(p)
    world.connect(d, 1)
    world.request(d)
    assert world.find().state is State.READY
    world.wait(1.5)
    world.connect(d, 0)
    assert len(world.orders(act.SendExecute)) == 2
    world.settle_all(d, world.find().number)
    assert ends(p) == ends(d) == [("DONE", "")]


@pytest.mark.parametrize(
    ("was_there", "reason", "words"),
    [
        (False, "AGENT_MISSING", "engine d: no agent is connected for ranks [0, 2]"),
        (True, "AGENT_LOST", "for ranks [0, 2], and it did not come back"),
    ],
)
def test_agents_that_stay_away_are_named(was_there: bool, reason: str, words: str) -> None:
    world = World()
    p, d = world.engine("p"), world.engine("d", 3, agents=False)
    world.ready(p)
    world.connect(d, 1)
    if was_there:
        world.connect(d, 0)
        world.disconnect(d, 0)
    world.request(d)
    world.wait(world.directory.limits.agent_wait_s + 0.1)
    assert ends(d) == [("FAILED", reason)]
    assert ends(p) == [], "another D may have it"
    assert d.told[0].detail.endswith(words)


def many(world: World) -> list[str]:
    """Request one handoff more than D reads at once."""
    names = [f"h{number}" for number in range(LEAST_SMALL_READS + 1)]
    for name in names:
        world.publish(world.side("p"), name, lease_s=60)
        world.fence(world.side("p"), name=name)
        world.request(world.side("d"), name, timeout_s=60)
    return names


def test_agents_that_came_are_missed_no_more_by_who_waits_for_his_turn() -> None:
    world = World()
    world.engine("p")
    d = world.engine("d", agents=False)
    last = world.find(many(world)[-1])
    world.wait(5)
    world.connect(d, 0)
    assert last.queued
    world.wait(world.directory.limits.agent_wait_s - 4.9)
    assert last.destination is d.record
    assert ends(d) == []


def test_agents_are_missed_anew_after_a_grant_that_was_given_back() -> None:
    world = World(staged=True)
    p, d = world.engine("p"), world.engine("d", agents=False)
    world.ready(p, lease_s=60)
    world.request(d, timeout_s=60)
    world.wait(1)
    world.connect(d, 0)
    world.wait(8.5)
    world.disconnect(p, 0)
    world.wait(1)
    assert not world.find().ended, "P's agent is away for a second"


def test_the_next_d_does_not_wait_in_the_queue_of_one_that_was_refused() -> None:
    world = World()
    world.engine("p")
    d = world.engine("d")
    last = world.find(many(world)[-1])
    world.disconnect(d, 0)
    for name in ("h0", "h1"):
        world.cancel(d, name)
    world.wait(0.1)
    world.wait(world.directory.limits.agent_wait_s + 0.1)
    assert ends(d)[-1] == ("FAILED", "AGENT_LOST")
    world.plans_at_once = False
    other = world.engine("other", 2)
    world.request(other, last.handoff_id)
    assert "plan" in world.directory.granting.waits_for(last)


def test_one_long_jump_of_the_clock_ends_everything_once() -> None:
    world, p, d = p_and_d()
    world.publish(p, "leased")
    world.request(d, "asked")
    world.ready(p)
    world.request(d)
    world.wait(10_000)
    assert sorted(told.handoff_id for told in p.told) == ["h", "leased"]
    assert sorted(told.handoff_id for told in d.told) == ["asked"]
    assert not world.directory.ledger.live
    world.connect(d, 0)
    assert sorted(told.handoff_id for told in d.told) == ["asked", "h"]


def test_engines_of_which_nothing_is_heard_are_forgotten() -> None:
    world = World(limits=Limits(engine_idle_s=100))
    silent = world.engine("silent", agents=False)
    world.engine("with agents")
    speaking = world.engine("speaking", agents=False)
    world.directory.members.session_opened(speaking.record, world.now_s)
    world.wait(99)
    assert not silent.record.gone
    actions = world.wait(2)
    assert kinds(actions) == ["CloseSession"]
    assert silent.record.gone
    assert len(world.directory.members.engines) == 2
    world.directory.members.session_closed(speaking.record, world.now_s)
    world.wait(101)
    assert speaking.record.gone


def test_an_expired_handoff_can_not_be_cancelled_by_a_stranger() -> None:
    world, p, other = p_and_d()
    world.ready(p, lease_s=1.0)
    world.wait(2)
    with pytest.raises(HandoffUnknownError):
        world.cancel(other)


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=12),
    st.integers(0, 1000),
)
def test_a_deadline_is_never_early_and_at_most_a_bucket_late(
    added: list[tuple[int, int]], began: int
) -> None:
    """Of each entry: after how many hundredths of a second it is added, and after how many due."""
    deadlines, open_until = Deadlines(bucket_s=0.05), dict[int, int]()
    for passed in range(90):
        for number, (when, after) in enumerate(added):
            if when == passed:
                open_until[number] = when + after
                deadlines.add((began + when + after) / 100, number)
        due = deadlines.due((began + passed) / 100)
        assert len(due) == len(set(due))
        for number in due:
            assert open_until.pop(number) <= passed
        assert all(until + 6 > passed for until in open_until.values())
        assert deadlines.numbers() == set(open_until)
