"""Streams that break while the process lives, and processes that do not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.test_staging import unstaged
from core.world import LIMITS, Side, World, alone, ends, kinds, p_and_d, reading
from restow.broker.core.common import actions as act
from restow.broker.core.common.keys import State
from restow.broker.errors import AgentReplacedError, HandoffUnknownError


def back(world: World, side: Side, rank: int = 0) -> None:
    """Break an agent's stream, and have the agent say Hello on another."""
    world.disconnect(side, rank)
    world.connect(side, rank, name=side.agents[rank].agent_name)


# -- P's streams ----------------------------------------------------------------------------------


def test_a_break_of_ps_stream_costs_no_state_that_is_ready() -> None:
    world, p, d = p_and_d(2)
    for index in range(5):
        world.ready(p, f"h{index}")
    for rank in (0, 1):
        back(world, p, rank)
    assert [one.state for one in world.directory.ledger.live.values()] == [State.READY] * 5
    for index in range(5):
        world.request(d, f"h{index}")
        world.settle(d, world.find(f"h{index}").number)
    assert ends(p) == ends(d) == [("DONE", "")] * 5
    assert not world.orders(act.SendForget), "readers know it still"


def test_what_is_asked_for_meanwhile_waits_until_it_is_back() -> None:
    world, p, d = p_and_d()
    world.ready(p)
    world.disconnect(p, 0)
    assert "SendExecute" not in kinds(world.request(d))
    world.wait(3.0)
    world.connect(p, 0, name=p.agents[0].agent_name)
    world.settle(d, world.find().number)
    assert ends(p) == ends(d) == [("DONE", "")]


def test_what_is_read_straight_from_its_pages_goes_on() -> None:
    world, p, d, number = reading(1, 2)
    back(world, p)
    world.settle_all(d, number)
    assert ends(p) == ends(d) == [("DONE", "")]


@pytest.mark.parametrize("what", ["name", "memory"])
def test_another_process_or_other_memory_is_no_return(what: str) -> None:
    world, p = alone("p")
    world.ready(p)
    world.disconnect(p, 0)
    name, pages = p.agents[0].agent_name, len("abc") + 97
    world.connect(p, 0, pages + (what == "memory"), name="" if what == "name" else name)
    assert ends(p) == [("FAILED", "AGENT_LOST")]


def test_what_it_had_gathered_is_gathered_anew_when_nobody_reads_any_more() -> None:
    world, p, d, number = reading(2, 2, staged=True)
    world.stage_all(p, number, 2)
    back(world, p, 1)
    assert ends(p) == ends(d) == []
    world.settle(d, number, 0, "READ_FAILED")
    assert world.find().number == number
    world.settle(d, number, 1)
    again = world.find().number
    assert again != number
    assert world.find().state is State.READY
    assert unstaged(world) == [0], "rank 1 dropped it with its stream"
    world.wait(0.02)
    assert world.settle(d, number, 0) == [], "a report of the grant before"
    world.stage_all(p, again, 2)
    world.settle_all(d, again)
    assert ends(p) == ends(d) == [("DONE", "")]
    assert world.find().bytes_read == 14


def test_what_can_not_be_given_anew_in_time_fails() -> None:
    world, p, d, number = reading(staged=True)
    world.stage_all(p, number, 1)
    back(world, p)
    world.wait(10.6)
    assert ends(p) == [("FAILED", "AGENT_LOST")]
    assert ends(d) == []
    world.settle(d, number)
    assert ends(d) == [("FAILED", "AGENT_LOST")]


def test_a_reader_that_is_away_is_sent_nothing() -> None:
    world, p, d, number = reading(1, 2)
    world.settle_all(d, number)
    world.disconnect(d, 1)
    world.connect(p, 0)
    assert [one.agent.rank for one in world.orders(act.SendForget)] == [0]


# -- D's streams ----------------------------------------------------------------------------------


@pytest.mark.parametrize("comes", [True, False], ids=["comes back", "is lost"])
def test_a_rank_that_is_away_at_the_end_of_the_grant_reads_again_if_it_comes_back(
    comes: bool,
) -> None:
    world, p, d, number = reading()
    world.renew(p, lease_s=600)
    world.wait(10.3)
    world.disconnect(d, 0)
    world.wait(1.0)  # the grant's grace is over, the time to come back is not
    assert (ends(d), world.find().number) == ([], number)
    if comes:
        world.connect(d, 0, name=d.agents[0].agent_name)
        world.wait(0.02)
        world.settle(d, world.find().number)
    else:
        world.wait(9.1)
    assert ends(p) == [("DONE", "") if comes else ("FAILED", "AGENT_LOST")]


def test_what_d_was_told_to_read_is_read_anew_when_its_agent_is_back() -> None:
    world, p, d, number = reading(1, 2)
    world.settle(d, number, 0)
    back(world, d, 1)
    world.wait(0.02)
    again = world.find().number
    assert [one.handoff for one in world.orders(act.SendExecute)] == [number, number, again, again]
    assert world.settle(d, number, 1) == []
    world.settle_all(d, again)
    assert ends(p) == ends(d) == [("DONE", "")]


def test_other_ranks_of_d_are_waited_for_before_it_is_read_anew() -> None:
    world, p, d, number = reading(1, 2)
    back(world, d, 1)
    world.wait(0.02)
    assert world.find().number == number
    world.settle(d, number, 0)
    world.wait(0.02)
    assert [one.handoff for one in world.orders(act.SendExecute)][2:] == [world.find().number] * 2
    assert ends(p) == ends(d) == []


@pytest.mark.parametrize("session", [True, False])
def test_ps_pages_are_free_soon_after_d_died(session: bool) -> None:
    # The broker waits for a D whose session lives: only its agents' streams broke.
    world, p, d, _ = reading(1, 2)
    if session:
        world.directory.members.session_opened(d.record, world.now_s)
    for rank in (0, 1):
        world.disconnect(d, rank)
    world.wait(world.directory.limits.agent_back_s + 0.1)
    assert ends(p) == ([] if session else [("FAILED", "AGENT_LOST")])
    assert ends(d) == []


# -- agents that come as another process -------------------------------------------------------

LOST = [("FAILED", "AGENT_LOST")]


def speaks(world: World, side: Side) -> None:
    """Open the engine's session, and let 0.1 s pass."""
    world.run(lambda now_s: world.directory.members.session_opened(side.record, now_s))
    world.now_s += 0.1


def read_early() -> tuple[World, Side, Side]:
    """Return a D of two ranks that has read 16 tokens early."""
    world, p, d = p_and_d(1, 2, early=True, limits=replace(LIMITS, early_bytes=0))
    world.publish(p, blocks={"kv": [1]}, final=False)
    world.request(d)
    world.fence(p, tokens=16)
    world.settle_all(d, world.find().number)
    return world, p, d


@pytest.mark.parametrize("early", [True, False])
def test_a_rank_of_d_that_is_replaced_after_it_has_settled_ends_the_delivery(early: bool) -> None:
    if early:  # it now reads the rest
        world, p, d = read_early()
        world.ready(p)
    else:
        world, p, d, _ = reading(1, 2)
    number = world.find().number
    world.settle(d, number, 0)
    world.connect(d, 0)
    assert ends(p) == LOST
    assert ends(d) == [], "rank 1 may still write"
    world.settle(d, number, 1)
    assert ends(d) == LOST


@pytest.mark.parametrize("comes_back", [True, False])
def test_between_two_early_reads_every_rank_of_d_stays_the_same_agent(comes_back: bool) -> None:
    world, p, d = read_early()
    world.disconnect(d, 0)
    if comes_back:
        world.connect(d, 0)
    else:
        world.wait(world.directory.limits.agent_wait_s + 0.1)
    assert ends(p) == ends(d) == LOST


def test_what_a_replaced_rank_has_read_is_not_given_anew() -> None:
    # The grant is given back because rank 1 came back; then rank 0 is another process.
    world, p, d, number = reading(1, 2)
    world.settle(d, number, 0)
    world.drain(True)
    back(world, d, 1)
    world.wait(0.02)
    assert world.find().state is State.READY
    world.connect(d, 0)
    world.drain(False)
    world.wait(0.02)
    assert ends(p) == ends(d) == LOST


def test_a_demand_that_is_said_again_does_not_bring_back_what_a_replaced_rank_had_read() -> None:
    world, p, d, number = reading(1, 2)
    world.settle(d, number, 0)
    world.disconnect(d, 0)
    speaks(world, d)
    world.request(d, repeated=True, number=1)
    world.connect(d, 0)
    world.settle(d, number, 1)
    assert ends(p) == ends(d) == LOST


def test_a_replaced_rank_ends_its_own_delivery_and_leaves_those_of_other_readers() -> None:
    world = World()
    p, d, e = world.engine("p"), world.engine("d", 2), world.engine("e")
    world.ready(p, readers=2)
    world.request(d)
    world.request(e)
    delivery = world.find().deliveries.by_engine[d.record.key].number
    world.settle(d, delivery, 0)
    world.connect(d, 0)
    world.settle(d, delivery, 1)
    assert ends(d) == LOST
    assert ends(p) == []
    world.settle(e, world.find().deliveries.by_engine[e.record.key].number)
    assert ends(e) == [("DONE", "")]


@pytest.mark.parametrize("first", ["session", "agents"])
def test_a_second_process_of_an_incarnation_ends_what_the_first_one_asked_for(first: str) -> None:
    world, p, d = p_and_d(1, 2)
    speaks(world, d)
    world.request(d)
    for rank in (0, 1):
        world.disconnect(d, rank)
    world.directory.members.session_closed(d.record, world.now_s)
    if first == "session":
        speaks(world, d)
    world.connect(d, 0)
    world.connect(d, 1)
    if first == "agents":
        speaks(world, d)
    assert ends(d) == LOST
    world.ready(p)
    assert not world.orders(act.SendExecute)


def test_a_second_process_is_known_though_the_death_of_the_first_was_not_noticed() -> None:
    # D's first session seems to be open, and D's demand came when its agent was away.
    world, d = alone("d")
    speaks(world, d)
    world.disconnect(d, 0)
    world.now_s += 0.1
    world.request(d)
    world.now_s += 0.1
    world.connect(d, 0)
    assert ends(d) == []
    speaks(world, d)
    assert ends(d) == LOST


def test_a_second_process_of_an_incarnation_ends_what_the_first_one_published() -> None:
    # Nothing that the first process published is fenced, and no byte of it may ever be.
    world, p, d = p_and_d()
    speaks(world, p)
    world.publish(p, blocks={"kv": [1]}, final=False)
    world.publish(p, "for several", blocks={"kv": [2]}, final=False, readers=2)
    for name in ("h", "for several"):
        world.request(d, name)
    world.disconnect(p, 0)
    speaks(world, p)
    world.connect(p, 0)
    assert ends(d) == 2 * LOST
    assert ends(p) == 2 * LOST


def test_what_a_living_engine_says_while_a_rank_is_away_outlives_the_rank() -> None:
    world, p, d = p_and_d()
    speaks(world, d)
    world.disconnect(d, 0)
    world.now_s += 0.1
    world.request(d)
    world.connect(d, 0)
    world.ready(p)
    world.settle(d, world.find().number)
    assert ends(p) == ends(d) == [("DONE", "")]


def test_an_agent_that_was_replaced_is_not_let_in_again() -> None:
    world, p = alone("p")
    name = p.agents[0].agent_name
    world.connect(p, 0)
    world.ready(p)
    with pytest.raises(AgentReplacedError):
        world.connect(p, 0, name=name)
    assert world.find().state is State.READY


# -- fences ---------------------------------------------------------------------------------------


def test_a_fence_is_said_until_its_handoff_has_ended() -> None:
    world, p, d, _ = reading(2)
    assert not world.orders(act.SendUnfence)
    world.settle(d, world.find().number)
    assert [one.agent.rank for one in world.orders(act.SendUnfence)] == [0, 1]
    world.fence(p, 1)
    assert [one.agent.rank for one in world.orders(act.SendUnfence)] == [0, 1, 1]


def test_fences_that_come_before_their_publication_are_no_handoffs_and_count() -> None:
    world, p = alone("p", 2)
    world.fence_all(p)
    assert not world.directory.ledger.live
    world.publish(p)
    assert world.find().state is State.READY
    assert len(p.record.unpublished_fences) == 0


def test_a_fence_of_a_process_that_died_before_the_publication_does_not_count() -> None:
    world, p = alone("p", 2)
    world.fence_all(p)
    world.connect(p, 1)
    world.publish(p)
    assert world.find().side.fenced == {0}
    world.fence(p, 1)
    assert world.find().state is State.READY


def test_a_fence_of_one_whose_stream_broke_before_the_publication_counts() -> None:
    world, p = alone("p")
    world.fence(p)
    back(world, p)
    world.publish(p)
    assert world.find().state is State.READY


CANCELLED = ("CANCELLED", "CANCELLED")


@pytest.mark.parametrize("asked", [True, False])
def test_giving_up_what_is_fenced_and_not_published_forgets_the_fences(asked: bool) -> None:
    world, p, d = p_and_d(2)
    if asked:
        world.request(d)
    world.fence(p, 1)
    world.cancel(p)
    assert [one.agent.rank for one in world.orders(act.SendUnfence)] == [1]
    world.fence(p, 0)  # it was on its way
    world.publish(p)
    if not asked:
        world.request(d)
    assert {CANCELLED} == set(ends(p)) == set(ends(d))
    assert len(p.record.unpublished_fences) == 0
    assert not world.orders(act.SendExecute)


@pytest.mark.parametrize("how", ["refused", "asked for in vain"])
def test_fences_of_what_ends_unpublished_are_forgotten(how: str) -> None:
    world, p, d = p_and_d()
    world.fence(p)
    if how == "refused":
        world.publish_refused(p, blocks={"kv": [1, 2, 1000], "state": [4]})
    else:
        world.request(d, timeout_s=0.1)
        world.wait(0.2)
        world.publish(p)
    assert len(p.record.unpublished_fences) == 0
    assert len(world.orders(act.SendUnfence)) == 1


def test_a_fence_that_comes_after_its_attempt_was_given_up_stands_for_nothing() -> None:
    world = World()
    p, d = world.engine("p", sides="P"), world.engine("d")
    world.cancel(p)
    world.fence(p)
    world.publish(p)
    world.request(d)
    assert ends(d) == [CANCELLED]
    assert not world.orders(act.SendExecute)


def test_an_engine_that_has_no_part_in_a_handoff_gives_up_nothing() -> None:
    world = World()
    p, d, q = world.engine("p"), world.engine("d"), world.engine("q")
    world.request(d)
    with pytest.raises(HandoffUnknownError):
        world.cancel(q)
    world.fence(q)
    world.publish(p)
    world.cancel(q)
    world.fence(p)
    world.settle(d, world.find().number)
    assert ends(p) == ends(d) == [("DONE", "")]


def test_a_d_that_cancels_what_it_never_asked_for_leaves_the_id_to_others() -> None:
    world = World()
    p, d = world.engine("p", sides="P"), world.engine("d", sides="D")
    with pytest.raises(HandoffUnknownError):
        world.cancel(d)
    world.publish(p)
    assert world.find().source is p.record


# -- whom nobody asks ------------------------------------------------------------------------------


def test_states_that_no_engine_is_there_to_ask_for_are_not_kept_long() -> None:
    world, p, d = p_and_d()
    world.ready(p, lease_s=300.0)
    limits = world.directory.limits
    world.wait(limits.unasked_s + 2)
    assert ends(p) == []
    world.disconnect(d, 0)
    world.wait(1.1)
    world.wait(limits.unasked_s - 1)
    assert ends(p) == []
    world.wait(2.0)
    assert ends(p) == [("EXPIRED", "NOT_ASKED_FOR")]


@pytest.mark.parametrize("other", ["publishes", "asks", "has done neither"])
def test_an_engine_that_only_publishes_is_no_d_to_wait_for(other: str) -> None:
    world = World()
    p, second, d = world.engine("p"), world.engine("second"), world.engine("d")
    if other == "asks":
        world.publish(d, "asked for")
        world.fence_all(d, "asked for")
        world.request(second, "asked for")
    if other != "has done neither":
        world.publish(second, "another")
    world.ready(p, lease_s=300.0)
    world.disconnect(d, 0)
    world.wait(1.1)
    world.wait(world.directory.limits.unasked_s + 1)
    alone = [("EXPIRED", "NOT_ASKED_FOR")]
    assert ends(p) == (alone if other == "publishes" else [])


def test_a_demand_ends_that_wait() -> None:
    world, p = alone("p")
    world.ready(p, lease_s=300.0)
    world.wait(20.0)
    d = world.engine("d")
    world.request(d)
    world.settle(d, world.find().number)
    assert ends(p) == ends(d) == [("DONE", "")]


# -- a publication that is refused ----------------------------------------------------------------


@pytest.mark.parametrize("asked_before", [True, False])
def test_d_hears_of_a_publication_that_is_refused(asked_before: bool) -> None:
    world, p, d = p_and_d()
    if asked_before:
        world.request(d)
    world.publish_refused(p, blocks={"kv": [1, 2, 1000], "state": [4]})
    if not asked_before:
        world.request(d)
    assert ends(d) == [("FAILED", "PUBLICATION_REFUSED")]
    assert "PAGE_OUT_OF_RANGE" in d.told[0].detail


def test_a_refusal_leaves_what_was_published_and_fenced_and_what_is_anothers() -> None:
    world = World()
    p, q, d = world.engine("p"), world.engine("q"), world.engine("d")
    world.ready(p)
    for side, position in ((p, 41), (q, 40)):
        heard = len(world.sent)
        world.publish_refused(side, position=position)
        assert len(world.sent) == heard
    world.request(d)
    world.settle(d, world.find().number)
    assert ends(p) == ends(d) == [("DONE", "")]


def test_of_two_publications_under_an_id_nobody_knows_whose_fence_comes() -> None:
    world, p, d = p_and_d(2)
    world.publish(p)
    world.fence(p, 0)
    world.request(d)
    world.publish_refused(p, position=41)
    world.fence(p, 1)
    assert ends(p) == ends(d) == [("FAILED", "PUBLICATION_REFUSED")]
    assert not world.orders(act.SendExecute)


@pytest.mark.parametrize("of_p", [True, False], ids=["P", "D"])
@pytest.mark.parametrize("noticed", [True, False], ids=["noticed", "unnoticed"])
@pytest.mark.parametrize("repeated", [True, False])
def test_what_a_process_named_before_its_first_agent_counts_once_its_session_repeats_it(
    of_p: bool, noticed: bool, repeated: bool
) -> None:
    # The engine may have died and started again under its incarnation: no agent tells.
    world = World()
    p, d = world.engine("p", agents=not of_p), world.engine("d", agents=of_p)
    side, members = p if of_p else d, world.directory.members
    world.run(lambda now_s: members.session_opened(side.record, now_s))
    world.publish(p)
    world.request(d)
    world.wait(1)
    if noticed:  # the agents come before the new session, else after it
        members.session_closed(side.record, world.now_s)
        world.wait(1)
        world.connect(side, 0)
    world.run(lambda now_s: members.session_opened(side.record, now_s))
    if not noticed:
        world.connect(side, 0)
    world.fence_all(p)
    assert not world.orders(act.SendExecute)
    words = f"engine {side.record.key.engine_id} has not repeated it since its session ended"
    assert world.directory.granting.waits_for(world.find()) == words
    if repeated:
        if of_p:
            world.publish(p, repeated=True)
        else:
            world.request(d, repeated=True)
        world.settle(d, world.find().number)
        assert ends(p) == [("DONE", "")]
    else:
        world.wait(60)
        assert ("DONE", "") not in ends(p) + ends(d)
        assert not world.orders(act.SendExecute)
