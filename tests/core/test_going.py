"""Engines that drain, go or are forgotten, and handoffs that a router gives up."""

from __future__ import annotations

import pytest

from core.world import Side, World, alone, ends, kinds, p_and_d, p_d_and_e, reading
from restow.broker.core.common import actions as act
from restow.broker.core.common.keys import State
from restow.broker.core.common.limits import Limits
from restow.broker.errors import (
    DirectoryFullError,
    EngineConnectedError,
    EngineDrainingError,
    EngineUnknownError,
    HandoffOwnedError,
)


def test_an_engine_that_drains_finishes_what_waits_on_either_side() -> None:
    world, p, d = p_and_d()
    world.ready(p, "held")
    world.publish(p, "begun", {}, final=False)
    world.request(d, "awaited")
    world.ready(p, "offered")
    world.wait(1)
    world.drain_engine(p)
    world.drain_engine(d)
    world.ready(p, "begun")
    world.ready(p, "awaited")
    for name in ("held", "begun", "offered"):
        world.request(d, name)
    for name in ("held", "begun", "awaited", "offered"):
        world.settle(d, world.find(name).number)
    assert ends(p) == ends(d) == [("DONE", "")] * 4


def test_an_engine_that_drains_takes_nothing_new() -> None:
    world = World()
    p, q, d = world.engine("p"), world.engine("q"), world.engine("d")
    world.drain_engine(p)
    world.wait(1)
    with pytest.raises(EngineDrainingError, match="engine p is draining and takes no new handoff"):
        world.publish(p, "new")
    with pytest.raises(EngineDrainingError):
        world.request(p, "new")
    world.request(d, "asked later")
    with pytest.raises(EngineDrainingError):
        world.publish(p, "asked later")
    world.publish(p, "lost on its way", repeated=True)
    assert world.find("lost on its way").source is p.record
    world.decline(p, "not wanted")
    world.drain_engine(p, False)
    world.publish(p, "new")
    world.publish(q, "asked later")
    assert not ends(q)


def test_another_d_may_ask_for_what_a_d_that_drains_is_refused() -> None:
    world, p, d, e = p_d_and_e()
    world.drain_engine(d)
    world.wait(1)
    world.ready(p)
    with pytest.raises(EngineDrainingError):
        world.request(d)
    world.request(e)
    world.settle(e, world.find().number)
    assert ends(p) == [("DONE", "")]


def test_handoffs_that_go_on_at_another_broker_count_no_more() -> None:
    # The audit after each event compares each tenant's counts with its live handoffs.
    world, p, d = p_and_d()
    world.publish(p, "waits")
    world.begin(p, d, "read")
    world.publish(p, "shared", readers=2)
    world.fence_all(p, "shared")
    world.request(d, "shared")
    moved = EngineUnknownError("another broker leads")
    world.run(lambda now_s: world.directory.members.hand_on(moved, now_s))
    assert not world.directory.ledger.by_number
    assert ends(p) == ends(d) == []


def test_an_id_that_ended_before_another_broker_led_may_be_used_anew() -> None:
    world, p, d, _ = reading()
    world.settle(d, world.find().number)
    moved = EngineUnknownError("another broker leads")
    world.run(lambda now_s: world.directory.members.hand_on(moved, now_s))
    p, d = world.engine("p"), world.engine("d")
    world.publish(p, repeated=True)  # as it was published to the other broker
    assert ends(p) == []
    assert world.find().state is State.WAITING


def test_a_new_life_does_not_drain() -> None:
    world = World()
    world.drain_engine(world.engine("p"))
    world.wait(1)
    world.publish(world.engine("p"))
    assert world.find().state is State.WAITING


@pytest.mark.parametrize("leaves", [True, False], ids=["itself", "an operator"])
def test_who_said_that_an_engine_drains_decides_whether_its_next_session_does(leaves: bool) -> None:
    world, p = alone("p")
    members = world.directory.members
    world.run(lambda now_s: members.drain(p.record, True, now_s, leaves=leaves))
    members.session_opened(p.record, world.now_s)
    assert p.record.draining is not leaves


def test_what_an_operator_says_of_an_engine_that_drains_by_itself_outlives_its_session() -> None:
    world, p = alone("p")
    members = world.directory.members
    world.run(lambda now_s: members.drain(p.record, True, now_s, leaves=True))
    world.run(lambda now_s: members.drain(p.record, True, now_s))
    world.run(lambda now_s: members.drain(p.record, True, now_s, leaves=True))
    members.session_opened(p.record, world.now_s)
    assert p.record.draining


def test_an_engine_is_forgotten_when_told_and_not_while_it_is_there() -> None:
    world, p, d = p_and_d()
    world.ready(p)
    with pytest.raises(EngineConnectedError, match="1 agents, session: none"):
        world.forget(p)
    world.disconnect(p, 0)
    world.directory.members.session_opened(p.record, world.now_s)
    with pytest.raises(EngineConnectedError, match="0 agents, session: open"):
        world.forget(p)
    world.directory.members.session_closed(p.record, world.now_s)
    world.forget(p)
    assert ends(p) == [("FAILED", "ENGINE_LOST")]
    with pytest.raises(EngineUnknownError):
        world.directory.members.find(p.record.key)
    assert list(world.directory.members.engines) == [d.record.key]


@pytest.mark.parametrize("fenced", [False, True])
def test_what_nobody_will_ask_for_is_given_up(fenced: bool) -> None:
    world, p, d = p_and_d()
    world.publish(p)
    if fenced:
        world.fence_all(p)
    world.abandon()
    assert ends(p) == [("CANCELLED", "ABANDONED")]
    world.abandon()
    world.request(d)
    assert ends(d) == ends(p) == [("CANCELLED", "ABANDONED")]


def test_what_is_given_up_before_p_publishes_is_free_when_it_does() -> None:
    world, p = alone("p")
    world.abandon()
    world.publish(p)
    assert ends(p) == [("CANCELLED", "ABANDONED")]
    assert not world.directory.ledger.live


@pytest.mark.parametrize("published", [False, True])
def test_what_somebody_has_asked_for_is_left_alone(published: bool) -> None:
    world, p, d = p_and_d()
    if published:
        world.ready(p)
    world.request(d)
    before = world.find().state
    assert world.abandon() == []
    assert world.find().state is before
    assert not ends(p)
    assert not ends(d)


def test_giving_up_what_is_not_known_is_bounded_like_all_else() -> None:
    world = World(limits=Limits(max_live=3, max_ended=2))
    for number in range(50):
        world.abandon(f"h{number}")
    assert len(world.directory.ledger.ended) == 2
    p = world.engine("p")
    for number in range(3):
        world.publish(p, f"live{number}")
    with pytest.raises(DirectoryFullError):
        world.abandon("more")


def test_of_another_tenant_nothing_is_given_up() -> None:
    world, p = alone("p")
    world.publish(p)
    world.abandon(tenant="other")
    assert not ends(p)


# -- engines that are gone ----------------------------------------------------------------------

GONE_S = 41.0
"""An agent may come back for 10 s, and what is left is forgotten after 30 s."""


def die(world: World, *sides: Side) -> None:
    """Disconnect all agents of the sides: processes are killed, and nobody unregisters."""
    for side in sides:
        for rank in list(side.agents):
            world.disconnect(side, rank)


def test_a_killed_engine_is_gone_in_less_than_a_minute() -> None:
    world, p = alone("p", 2)
    world.ready(p)
    die(world, p)
    for _ in range(45):
        world.wait(1)
    assert p.record.gone
    assert not world.directory.members.engines


def test_what_is_open_keeps_an_engine() -> None:
    world = World()
    d = world.engine("d", agents=False)
    world.request(d, timeout_s=300)
    for _ in range(29):
        world.wait(10)
    assert not d.record.gone
    world.wait(11)
    assert ends(d) == [("EXPIRED", "NOT_PUBLISHED")]
    world.wait(1)
    assert d.record.gone


def test_p_that_was_forgotten_hears_how_its_publication_ended() -> None:
    world, p = alone("p")
    world.ready(p)
    die(world, p)
    world.wait(11)
    world.wait(GONE_S)
    assert p.record.gone
    back = world.engine("p", life=p.record.incarnation, agents=False)
    world.publish(back, repeated=True)
    assert ends(back) == [("FAILED", "AGENT_LOST")]
    with pytest.raises(HandoffOwnedError):
        world.publish(world.engine("other"), repeated=True)


@pytest.mark.parametrize("word", ["request", "cancel"])
def test_d_that_was_forgotten_hears_it_when_no_rank_of_its_writes_any_more(word: str) -> None:
    # The ranks of D may have stood still since, in the middle of a read.
    world, p, d, _ = reading(1, 2)
    die(world, d)
    world.wait(GONE_S)
    assert d.record.gone
    assert ends(p) == [("FAILED", "AGENT_LOST")]
    back = world.engine("d", 2, life=d.record.incarnation, agents=False)
    again = word == "request"
    actions = world.request(back, repeated=True, number=1) if again else world.cancel(back)
    assert kinds(actions) == []
    world.connect(back, 0)
    assert ends(back) == []
    world.connect(back, 1)
    assert ends(back) == [("FAILED", "AGENT_LOST")]
    assert isinstance(world.sent[-1], act.TellEnded)
