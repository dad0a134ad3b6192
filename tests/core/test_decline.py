"""A D that does without a state, and one that wants it at a certain position."""

from __future__ import annotations

import pytest

from core.world import alone, ends, p_and_d, p_d_and_e, reading
from restow.broker.core.common import actions as act
from restow.broker.errors import HandoffConflictError, HandoffOwnedError


def test_p_is_told_at_once_that_nobody_needs_its_pages() -> None:
    world, p, d = p_and_d()
    world.publish(p)
    world.decline(d)
    assert ends(p) == ends(d) == [("CANCELLED", "DECLINED")]


def test_p_that_publishes_later_is_told_then() -> None:
    world, p, d = p_and_d()
    world.decline(d)
    world.publish(p)
    assert ends(p) == ends(d) == [("CANCELLED", "DECLINED")]
    assert not world.orders(act.SendExecute)


def test_declining_again_changes_nothing() -> None:
    world, p, d = p_and_d()
    world.publish(p)
    for _ in range(2):
        world.decline(d)
    assert ends(p) == [("CANCELLED", "DECLINED")]
    assert ends(d) == [("CANCELLED", "DECLINED")] * 2


def test_another_engine_can_t_decline_for_d() -> None:
    world, p, d, other = p_d_and_e()
    world.publish(p)
    world.request(d)
    with pytest.raises(HandoffOwnedError):
        world.decline(other)
    assert ends(p) == ends(other) == []


def test_a_read_that_was_granted_is_waited_for() -> None:
    world, p, d, number = reading()
    world.decline(d)
    assert ends(p) == [("CANCELLED", "DECLINED")]
    assert ends(d) == []
    world.settle(d, number)
    assert ends(p) == [("CANCELLED", "DECLINED")]
    assert ends(d) == 2 * [("CANCELLED", "DECLINED")], "of the demand, and of the decline"


@pytest.mark.parametrize(("wanted", "held"), [(0, 0), (40, 0), (39, 0), (56, 48)])
def test_a_state_that_stands_elsewhere_is_not_handed_over(wanted: int, held: int) -> None:
    world, p, d = p_and_d()
    world.ready(p, position=40, content=b"1" * 16)
    world.request(d, position=wanted, held=held, content=b"2" * 16 if wanted > 40 else b"")
    if wanted not in (0, 40):  # the position decides, whatever else differs
        assert ends(d) == [("FAILED", "POSITION_MISMATCH")]
        assert "P's state is at position 40" in d.told[-1].detail
        assert ends(p) == [], "another D may have it"
        assert not world.orders(act.SendExecute)
    else:
        assert world.orders(act.SendExecute)


def test_another_position_is_another_demand() -> None:
    world, d = alone("d")
    world.request(d, position=40)
    assert world.request(d, position=40, repeated=True) == []
    with pytest.raises(HandoffConflictError):
        world.request(d, position=39, repeated=True)
