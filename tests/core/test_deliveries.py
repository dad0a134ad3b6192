"""Publications with readers: each D has a delivery, and P its pages when so many have the state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from core.world import LIMITS, Side, World, ends, of_kind, p_and_d, p_d_and_e
from restow.broker.core.audit import audit
from restow.broker.core.common import actions as act
from restow.broker.core.common.keys import State
from restow.broker.core.common.pair import PairRefused
from restow.broker.core.handoffs.handoff import MAX_DELIVERIES, Handoff
from restow.broker.errors import (
    DirectoryFullError,
    HandoffConflictError,
    HandoffOwnedError,
    PlanError,
)

DONE = ("DONE", "")


def numbers(actions: list[act.Action]) -> list[int]:
    """Return the numbers of the orders to read."""
    return [one.handoff for one in of_kind(act.SendExecute, actions)]


def published(
    readers: int = 2, ds: str = "d", *, lease_s: float = 30.0, **how: Any
) -> tuple[World, Side, list[Side]]:
    """Return a P that has published for several readers, and the D's named by ``ds``."""
    world = World(**how)
    p = world.engine("p", 2)
    world.ready(p, readers=readers, lease_s=lease_s)
    return world, p, [world.engine(name) for name in ds]


def delivery(world: World, side: Side) -> Handoff:
    return world.find().deliveries.by_engine[side.record.key]


def test_each_of_two_readers_has_a_delivery_and_p_is_told_after_the_second() -> None:
    world, p, (d,) = published()
    e = world.engine("e", 2)
    (first,) = numbers(world.request(d))
    seconds = numbers(world.request(e))
    assert len(seconds) == 2
    assert len({first, *seconds}) == 2
    world.settle(d, first)
    assert ends(d) == [DONE]
    assert ends(p) == []
    assert world.find().state is State.READY
    world.settle(e, seconds[0], 0)
    assert ends(e) == []
    assert ends(p) == []
    world.settle(e, seconds[0], 1)
    assert ends(e) == [DONE]
    assert ends(p) == [DONE]
    assert p.told[0].delivered == 2
    assert p.told[0].bytes == 21
    assert not world.directory.ledger.by_number


def test_a_delivery_that_fails_uses_up_none_and_another_d_takes_its_place() -> None:
    world, p, (d, e, f) = published(2, "def")
    (first,) = numbers(world.request(d))
    (second,) = numbers(world.request(e))
    assert numbers(world.request(f)) == []  # both places are taken: it waits
    assert "2 readers" in world.directory.granting.waits_for(delivery(world, f))
    world.settle(d, first, reason="TRANSFER_FAILED")
    assert ends(d) == [("FAILED", "TRANSFER_FAILED")]
    assert ends(p) == []
    (third,) = numbers(world.wait(0.02))
    world.settle(f, third)
    world.settle(e, second)
    assert ends(p) == [DONE]
    assert p.told[0].delivered == 2
    assert [ends(one) for one in (e, f)] == [[DONE], [DONE]]


def test_the_same_d_may_ask_again_after_it_failed_and_not_after_it_was_done() -> None:
    world, p, (d,) = published()
    (number,) = numbers(world.request(d))
    world.settle(d, number, reason="TRANSFER_FAILED")
    (again,) = numbers(world.request(d, blocks={"kv": [21, 22, 23], "state": [24]}))
    assert again != number
    world.settle(d, again)
    assert ends(d)[-1] == DONE
    assert ends(p) == []
    with pytest.raises(HandoffConflictError, match="asks for it again"):
        world.request(d)


def test_one_reader_that_is_named_outlives_a_failure_and_one_that_is_not_does_not() -> None:
    for readers, told in ((1, []), (0, [("FAILED", "TRANSFER_FAILED")])):
        world, p, (d,) = published(readers)
        (number,) = numbers(world.request(d))
        world.settle(d, number, reason="TRANSFER_FAILED")
        assert ends(p) == told


def test_who_asks_when_all_readers_have_it_is_refused() -> None:
    world, p, (d, e) = published(1, "de")
    (number,) = numbers(world.request(d))
    world.request(e)
    world.settle(d, number)
    assert ends(p) == [DONE]
    assert ends(e) == [("FAILED", "HANDOFF_OWNED")]
    with pytest.raises(HandoffOwnedError, match="1 of 1 readers have it"):
        world.request(world.engine("f"))
    with pytest.raises(HandoffOwnedError):
        world.decline(world.engine("g"))


def test_who_asks_after_the_publication_has_failed_is_told_how() -> None:
    world, p, (d,) = published()
    world.cancel(p)
    world.request(d)
    assert ends(p) == ends(d) == [("CANCELLED", "CANCELLED")]
    with pytest.raises(HandoffOwnedError):  # one that knows no readers owns it, as ever
        world.publish(world.engine("q"))


def test_ds_that_name_readers_wait_side_by_side_before_p_has_published() -> None:
    world, p, d, e = p_d_and_e()
    world.request(d, readers=2)
    world.request(e, readers=2)
    world.request(d, "alone")
    with pytest.raises(HandoffOwnedError):
        world.request(e, "alone", readers=2)
    world.ready(p)  # it knows of no readers: the router told the Ds
    first, second = numbers(world.sent)
    world.settle(d, first)
    assert ends(p) == []
    world.settle(e, second)
    assert ends(p) == [DONE]


def test_a_demand_that_names_no_readers_becomes_a_delivery_when_p_names_some() -> None:
    world, p, d, e = p_d_and_e()
    world.request(d)
    world.publish(p, blocks={"kv": [1]}, final=False, readers=2)
    world.request(e)
    world.publish(p, blocks={"kv": [2, 3]}, final=False, first=1)
    world.ready(p, blocks={"state": [4]}, readers=2)
    first, second = numbers(world.sent)
    world.settle(d, first)
    world.settle(e, second)
    assert ends(p) == ends(d) == ends(e) == [DONE]


def test_the_number_of_readers_that_p_names_counts_and_not_a_ds() -> None:
    world, p, (d, e) = published(2, "de")
    for side in (d, e):
        (number,) = numbers(world.request(side, readers=5))
        world.settle_all(side, number)
    assert ends(p) == [DONE]
    assert p.told[0].readers == 2


def test_the_number_of_readers_that_p_names_counts_also_after_a_d_named_another() -> None:
    world, p, d, e = p_d_and_e()
    world.request(d, readers=5)
    world.ready(p, readers=2)
    (first,) = numbers(world.sent)
    world.settle(d, first)
    assert ends(p) == []
    (second,) = numbers(world.request(e, readers=5))
    world.settle(e, second)
    assert ends(p) == [DONE]
    assert p.told[0].readers == 2


def test_deliveries_need_room_like_handoffs() -> None:
    world, p, (d, e) = published(2, "de", limits=replace(LIMITS, max_live=2))
    world.request(d)
    with pytest.raises(DirectoryFullError):
        world.request(e)
    assert ends(p) == []


def test_a_d_that_waits_too_long_for_a_readers_place_is_told_so() -> None:
    world, p, (d, e) = published(1, "de")
    world.request(d)
    world.request(e, timeout_s=5.0)
    world.wait(5.1)
    assert ends(e) == [("EXPIRED", "HANDOFF_OWNED")]
    assert ends(p) == ends(d) == []


def test_a_d_that_waits_no_longer_does_not_end_a_publication_for_several() -> None:
    world, p, d = p_and_d()
    world.request(d, timeout_s=5.0)
    world.publish(p, blocks={"kv": [1]}, final=False, readers=2)
    world.wait(6.0)
    assert ends(d) == [("EXPIRED", "NOT_PUBLISHED")]
    assert ends(p) == []
    world.publish(p, blocks={"kv": [2, 3]}, final=False, first=1)


def test_a_third_d_waits_when_one_of_two_readers_declined_and_the_other_reads() -> None:
    world, p, (d, e, f) = published(2, "def")
    world.decline(d)
    (number,) = numbers(world.request(e))
    assert numbers(world.request(f)) == []
    world.settle_all(e, number)
    assert ends(p) == [DONE]
    assert ends(f) == [("FAILED", "HANDOFF_OWNED")]


def test_other_readers_are_another_publication() -> None:
    world, p, _ = published()
    with pytest.raises(HandoffConflictError, match=r"differs in .*readers"):
        world.publish(p, readers=3)
    world.publish(p, readers=2, repeated=True)


def test_a_decline_takes_a_readers_place_and_all_of_them_end_the_publication() -> None:
    world, p, (d, e) = published(2, "de")
    world.decline(d)
    assert ends(d) == [("CANCELLED", "DECLINED")]
    assert ends(p) == []
    (number,) = numbers(world.request(e))
    world.settle(e, number)
    assert ends(p) == [DONE]
    assert p.told[0].delivered == 1

    world = World()
    d, e = world.engine("d"), world.engine("e")
    world.decline(d, readers=2)
    world.decline(e, readers=2)
    p = world.engine("p")
    world.publish(p, readers=2)
    assert ends(p) == [("CANCELLED", "DECLINED")]
    assert not p.told[0].delivered


def test_a_decline_while_all_places_are_read_is_nobodys_place() -> None:
    world, p, (d, e, f) = published(1, "def")
    (number,) = numbers(world.request(d))
    world.decline(e)
    assert ends(p) == []
    world.settle(d, number, reason="TRANSFER_FAILED")
    (again,) = numbers(world.request(f))
    world.settle(f, again)
    assert ends(f) == [DONE]
    assert ends(p) == [DONE]


def test_the_lease_ends_it_with_what_was_delivered() -> None:
    world, p, (d,) = published(lease_s=5.0)
    (number,) = numbers(world.request(d))
    world.settle(d, number)
    world.wait(5.1)
    assert ends(p) == [("EXPIRED", "LEASE_EXPIRED")]
    assert p.told[0].delivered == 1
    assert "1 of 2 readers have it" in p.told[0].detail


def test_a_read_under_way_when_the_lease_ends_is_waited_for() -> None:
    world, p, (d, e) = published(2, "de", lease_s=5.0)
    (number,) = numbers(world.request(d))
    world.request(e, timeout_s=2.0)
    world.wait(4.0)
    assert delivery(world, e).state is State.FAILED  # held until its rank is heard of
    world.wait(0.95)
    assert ends(p) == []
    assert ends(d) == []
    world.wait(0.1)  # the lease is over, the grant's grace is not
    assert ends(p) == []
    world.settle(d, number)
    assert ends(d) == [("FAILED", "GRANT_OUTLIVED")]
    world.wait(0.1)
    assert ends(p) == [("EXPIRED", "LEASE_EXPIRED")]


def test_a_renewal_prolongs_every_delivery() -> None:
    world, p, _ = published(ds="", lease_s=2.0)
    d = world.engine("d", agents=False)
    world.request(d)
    world.renew(p, lease_s=8.0)
    world.wait(5.0)
    world.connect(d, 0)
    (number,) = numbers(world.sent)
    world.settle(d, number)
    assert ends(d) == [DONE]


def test_when_nobody_asks_again_p_has_its_pages_back() -> None:
    world, p, (d,) = published(lease_s=100.0, limits=replace(LIMITS, unasked_s=3.0))
    (number,) = numbers(world.request(d))
    world.settle(d, number, reason="TRANSFER_FAILED")
    world.wait(2.9)
    assert ends(p) == []
    world.wait(0.2)
    assert ends(p) == [("EXPIRED", "NOT_ASKED_FOR")]


def test_p_is_not_unasked_once_another_d_asks() -> None:
    limits = replace(LIMITS, unasked_s=3.0)
    world, p, (d, e) = published(lease_s=100.0, ds="de", limits=limits)
    (number,) = numbers(world.request(d))
    world.settle(d, number, reason="TRANSFER_FAILED")
    world.wait(2.0)
    (number,) = numbers(world.request(e))
    world.wait(2.0)
    assert ends(p) == []


def test_p_is_not_unasked_while_a_d_that_can_not_read_yet_has_asked() -> None:
    limits = replace(LIMITS, unasked_s=3.0)
    world, p, (d,) = published(lease_s=100.0, limits=limits)
    e = world.engine("e", agents=False)
    (number,) = numbers(world.request(d))
    world.settle(d, number, reason="TRANSFER_FAILED")
    world.wait(2.0)
    world.request(e)
    world.wait(2.0)
    assert ends(p) == []


def test_p_keeps_its_pages_for_other_readers_after_one_of_them_has_the_state() -> None:
    world, p, (d,) = published(lease_s=100.0, limits=replace(LIMITS, unasked_s=3.0))
    (number,) = numbers(world.request(d))
    world.settle(d, number)
    world.wait(4.0)
    assert ends(p) == []


def test_a_publication_ends_with_its_lease_though_a_read_might_have_outlived_it() -> None:
    limits = replace(LIMITS, settle_grace_s=7.0)
    world, p, (d,) = published(lease_s=5.0, limits=limits)
    e = world.engine("e", agents=False)
    (number,) = numbers(world.request(d))
    world.request(e, timeout_s=60.0)
    world.renew(p, lease_s=6.0)
    world.wait(5.1)
    assert ends(p) == []
    world.settle(d, number)
    world.wait(1.0)
    assert ends(p) == [("EXPIRED", "LEASE_EXPIRED")]


def test_a_demand_that_becomes_a_delivery_is_as_old_as_it_was() -> None:
    # D's new process asked before its agent came, and keeps what it asked for.
    world, p, d = p_and_d()
    world.disconnect(d, 0)
    world.now_s += 0.1
    world.directory.members.session_closed(d.record, world.now_s)
    world.run(lambda now_s: world.directory.members.session_opened(d.record, now_s))
    world.request(d)
    world.publish(p, blocks={"kv": [1]}, final=False, readers=2)
    world.connect(d, 0)
    assert ends(d) == []
    world.publish(p, blocks={"kv": [2, 3]}, first=1, final=False)
    world.publish(p, blocks={"state": [4]}, readers=2)
    (number,) = numbers(world.fence_all(p))
    world.settle(d, number)
    assert ends(d) == [DONE]


def test_p_that_goes_ends_all_deliveries_and_a_d_that_goes_its_own() -> None:
    world, p, (d, e) = published(2, "de")
    world.request(d)
    (number,) = numbers(world.request(e))
    world.unregister(d)
    assert ends(p) == []
    assert ends(e) == []
    world.unregister(p)
    assert ends(e) == []  # its rank may still write
    world.settle(e, number)
    assert ends(e) == [("FAILED", "ENGINE_LOST")]


def test_a_d_that_is_lost_in_its_read_is_told_when_its_rank_is_heard_of_and_another_reads() -> None:
    world, p, (d, e) = published(1, "de")
    (number,) = numbers(world.request(d))
    world.request(e)
    world.disconnect(d, 0)
    world.wait(LIMITS.agent_back_s + 1.0)
    (other,) = numbers(world.wait(0.02))
    assert ends(d) == []
    assert world.directory.ledger.quarantine.ranks(d.record, number) == {0}
    world.settle(e, other)
    assert ends(p) == [DONE]
    assert ends(e) == [DONE]
    assert ends(d) == []
    world.connect(d, 0)
    assert ends(d) == [("FAILED", "AGENT_LOST")]


def test_layouts_that_can_not_be_planned_end_their_delivery_alone() -> None:
    world, p, (e,) = published(1, "e")
    d = world.engine("d", 2)
    world.outcome = PairRefused(PlanError("no"))
    world.request(d)
    world.outcome = None
    assert ends(d) == [("FAILED", "PLAN_INVALID")]
    assert ends(p) == []
    (number,) = numbers(world.request(e))
    world.settle(e, number)
    assert ends(p) == [DONE]


def test_staging_is_given_back_by_delivery() -> None:
    world, p, (d, e) = published(2, "de", staged=True)
    staging = {}
    for one in (d, e):
        (stage, _) = (a for a in world.request(one) if isinstance(a, act.SendStage))
        staging[one.record.key] = stage.handoff
    for one in (d, e):
        number = staging[one.record.key]
        world.stage(p, number, 0)
        assert numbers(world.stage(p, number, 1)) == [number]
    given_back = world.settle(d, staging[d.record.key])
    unstaged = of_kind(act.SendUnstage, given_back)
    assert {one.handoff for one in unstaged} == {staging[d.record.key]}
    world.disconnect(p, 0)  # what it gathered it drops: the other grant is given back
    world.settle(e, staging[e.record.key])
    world.connect(p, 0, name=p.agents[0].agent_name)
    again = of_kind(act.SendStage, world.wait(0.02))
    assert {one.handoff for one in again}.isdisjoint(staging.values())
    assert ends(d) == [DONE]
    assert ends(e) == []


def test_the_place_of_a_grant_that_is_given_back_goes_to_whom_can_read() -> None:
    world, p, (d, e) = published(1, "de", staged=True)
    (first, _) = of_kind(act.SendStage, world.request(d))
    assert not of_kind(act.SendStage, world.request(e))
    world.disconnect(d, 0)
    world.disconnect(p, 0)  # what it gathered it drops: the grant is given back
    world.connect(p, 0, name=p.agents[0].agent_name)
    (stage, _) = of_kind(act.SendStage, world.wait(0.02))
    assert stage.handoff != first.handoff
    for rank in (0, 1):
        world.stage(p, stage.handoff, rank)
    world.settle(e, stage.handoff)
    assert ends(e) == ends(p) == [DONE]


def test_a_publication_ends_with_its_lease_though_a_delivery_could_have_read_for_longer() -> None:
    limits = replace(LIMITS, settle_grace_s=7.0)
    world, p, (e,) = published(2, "e", lease_s=2.0, limits=limits, staged=True)
    (stage, _) = of_kind(act.SendStage, world.request(e))
    for rank in (0, 1):
        world.stage(p, stage.handoff, rank)
    world.wait(1.0)
    world.renew(p, lease_s=2.0)
    world.wait(1.1)  # the clock looks, and next when nobody can be reading any more
    world.disconnect(p, 0)
    world.settle(e, stage.handoff)  # the grant is given back
    assert ends(p) == []
    world.wait(1.0)
    assert ends(p) == [("EXPIRED", "LEASE_EXPIRED")]


def test_a_refused_demand_leaves_no_trace_and_a_cancelled_one_no_place() -> None:
    world, p, (d, e) = published(1, "de")
    with pytest.raises(Exception, match="odd"):
        world.request(d, blocks={"odd": [1]})
    assert not world.find().deliveries.by_engine
    (number,) = numbers(world.request(d))
    world.request(e)
    world.cancel(e)
    assert ends(e) == [("CANCELLED", "CANCELLED")]
    assert ends(p) == []
    world.cancel(d)
    world.settle(d, number)
    assert ends(d) == [("CANCELLED", "CANCELLED")]
    assert ends(p) == []
    world.cancel(p)
    assert ends(p) == [("CANCELLED", "CANCELLED")]


def test_a_repeated_demand_is_told_its_end_again() -> None:
    world, p, (d,) = published()
    (number,) = numbers(world.request(d))
    world.settle(d, number)
    world.request(d, repeated=True, number=1)
    assert ends(d) == [DONE, DONE]
    with pytest.raises(HandoffConflictError):
        world.request(d, blocks={"kv": [1, 2, 3], "state": [5]}, repeated=True, number=1)
    assert ends(p) == []


def test_so_many_deliveries_and_no_more() -> None:
    """Check the limit of deliveries: ended deliveries that failed are forgotten.

    A D that has the state is never forgotten.
    """
    world, _, _ = published(limits=replace(LIMITS, max_live=1000, max_engines=1000))
    sides = [world.engine(f"d{number}") for number in range(MAX_DELIVERIES + 1)]
    (number,) = numbers(world.request(sides[0]))
    world.settle(sides[0], number)
    for side in sides[1:-1]:
        world.request(side)
    with pytest.raises(HandoffOwnedError):
        world.request(sides[-1])
    world.cancel(sides[2])
    world.request(sides[-1])
    assert sides[2].record.key not in world.find().deliveries.by_engine
    assert delivery(world, sides[0]).state is State.DONE


def test_a_router_gives_up_what_nobody_asks_for_and_an_operator_all_of_it() -> None:
    world, p, (d,) = published()
    (number,) = numbers(world.request(d))
    assert world.abandon() == []
    world.release(world.find())
    assert ends(p) == [("CANCELLED", "RELEASED")]
    assert ends(d) == []
    world.settle(d, number)
    assert ends(d) == [("CANCELLED", "RELEASED")]


def test_the_audit_compares_each_delivery_with_its_publication() -> None:
    # The simulation and the tests rely on the audit, so this test breaks each of its rules by hand.
    world, _, (d,) = published()
    world.request(d)
    publication, part = world.find(), delivery(world, d)
    kept_s = part.lease.until_s
    part.lease.until_s = publication.lease.until_s + 1
    assert any("to d have different leases" in words for words in audit(world.directory))
    part.lease.until_s = publication.lease.until_s = part.lease.grant_until_s
    assert any("may be read by d after its lease" in words for words in audit(world.directory))
    part.lease.until_s = publication.lease.until_s = kept_s
    part.parent = part
    assert any("belongs to another publication" in words for words in audit(world.directory))
