"""A D that does without a state, and one that wants it at a certain position."""

from __future__ import annotations

import pytest

from core.world import World, ends
from restow.broker.core.common import actions as act
from restow.broker.errors import HandoffConflictError, HandoffOwnedError


def test_p_is_told_at_once_that_nobody_needs_its_pages() -> None:
    world = World()
    p, d = world.engine("p"), world.engine("d")
    world.publish(p)
    world.decline(d)
    assert ends(p) == ends(d) == [("CANCELLED", "DECLINED")]


def test_p_that_publishes_later_is_told_then() -> None:
    world = World()
    p, d = world.engine("p"), world.engine("d")
    world.decline(d)
    world.publish(p)
    assert ends(p) == ends(d) == [("CANCELLED", "DECLINED")]
    assert not world.orders(act.SendExecute)


def test_declining_again_changes_nothing() -> None:
    world = World()
    p, d = world.engine("p"), world.engine("d")
    world.publish(p)
    for _ in range(2):
        world.decline(d)
    assert ends(p) == [("CANCELLED", "DECLINED")]
    assert ends(d) == [("CANCELLED", "DECLINED")] * 2


def test_another_engine_can_t_decline_for_d() -> None:
    world = World()
    p, d, other = world.engine("p"), world.engine("d"), world.engine("other")
    world.publish(p)
    world.request(d)
    with pytest.raises(HandoffOwnedError):
        world.decline(other)
    assert ends(p) == ends(other) == []


def test_a_read_that_was_granted_is_waited_for() -> None:
    world = World()
    p, d = world.engine("p"), world.engine("d")
    world.publish(p)
    world.fence(p)
    world.request(d)
    number = world.find().number
    world.decline(d)
    assert ends(p) == [("CANCELLED", "DECLINED")]
    assert ends(d) == []
    world.settle(d, number)
    assert ends(p) == [("CANCELLED", "DECLINED")]
    assert ends(d) == 2 * [("CANCELLED", "DECLINED")], "of the demand, and of the decline"


@pytest.mark.parametrize(("wanted", "state"), [(0, ""), (40, ""), (39, "POSITION_MISMATCH")])
def test_a_state_that_stands_elsewhere_is_not_handed_over(wanted: int, state: str) -> None:
    world = World()
    p, d = world.engine("p"), world.engine("d")
    world.publish(p, position=40)
    world.fence(p)
    world.request(d, position=wanted)
    if state:
        assert ends(d) == [("FAILED", state)]
        assert ends(p) == [], "another D may have it"
        assert not world.orders(act.SendExecute)
    else:
        assert world.orders(act.SendExecute)


def test_another_position_is_another_demand() -> None:
    world = World()
    d = world.engine("d")
    world.request(d, position=40)
    assert world.request(d, position=40, repeated=True) == []
    with pytest.raises(HandoffConflictError):
        world.request(d, position=39, repeated=True)
