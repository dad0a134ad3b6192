"""What a state is of: named by both sides, and compared."""

from __future__ import annotations

import pytest

from core.world import POSITION, World, ends, p_and_d, p_d_and_e
from restow.broker.core.common.keys import State
from restow.broker.core.handoffs.demand import content_compared
from restow.broker.errors import ContentMismatchError, HandoffConflictError

ONE, OTHER = b"1" * 32, b"2" * 32


def compared(world: World) -> str:
    handoff = world.find()
    return content_compared(handoff.publication, handoff.demand)


def test_other_content_than_ps_is_refused_and_the_right_one_served() -> None:
    world, p, d, e = p_d_and_e()
    world.ready(p, content=ONE)
    with pytest.raises(ContentMismatchError, match="same prompt"):
        world.request(d, position=POSITION, content=OTHER)
    assert world.find().state is State.READY
    world.request(e, position=POSITION, content=ONE)
    world.settle(e, world.find().number)
    assert ends(p) == ends(e) == [("DONE", "")]
    assert ends(d) == []
    assert compared(world) == "compared"
    assert [(one.position, one.compared) for one in (*p.told, *e.told)] == [(POSITION, True)] * 2


def test_a_d_that_asked_first_hears_it_and_p_keeps_its_state() -> None:
    world, p, d, e = p_d_and_e()
    world.request(d, position=POSITION, content=OTHER)
    world.fence(p)
    world.publish(p, content=ONE)
    assert ends(d) == [("FAILED", "CONTENT_MISMATCH")]
    assert ends(p) == []
    world.request(e, position=POSITION, content=ONE)
    world.settle(e, world.find().number)
    assert ends(p) == ends(e) == [("DONE", "")]


def test_another_position_is_told_as_such() -> None:
    world, p, d = p_and_d()
    world.request(d, position=POSITION - 1, content=OTHER)
    world.ready(p, content=ONE)
    assert ends(d) == [("FAILED", "POSITION_MISMATCH")]
    world.wait(30.1)
    assert ends(p) == [("EXPIRED", "NOT_ASKED_FOR")]
    assert "POSITION_MISMATCH to d" in p.told[0].detail


def test_p_of_several_hears_whether_the_content_was_compared_for_each() -> None:
    world, p, d, e = p_d_and_e()
    world.ready(p, content=ONE, readers=2)
    for side, content in ((d, ONE), (e, b"")):
        world.request(side, position=POSITION, content=content)
        world.settle(side, next(iter(world.find().deliveries)).number)
    assert [one.compared for one in (*d.told, *e.told, *p.told)] == [True, False, False]


@pytest.mark.parametrize(
    ("src", "dst", "words"),
    [
        (b"", b"", "not named"),
        (ONE, b"", "named by P alone"),
        (b"", ONE, "named by D alone"),
        (ONE, ONE, "compared"),
    ],
)
def test_a_side_that_names_none_is_served_and_shown(src: bytes, dst: bytes, words: str) -> None:
    world, p, d = p_and_d()
    world.ready(p, content=src)
    world.request(d, position=POSITION, content=dst)
    world.settle(d, world.find().number)
    assert ends(d) == [("DONE", "")]
    assert compared(world) == words
    assert [one.compared for one in (*p.told, *d.told)] == [words == "compared"] * 2


def test_other_content_is_another_publication_and_another_demand() -> None:
    world, p, d = p_and_d()
    world.publish(p, content=ONE)
    with pytest.raises(HandoffConflictError, match="differs in blocks, position, content"):
        world.publish(p, content=OTHER)
    assert world.publish(p, content=ONE) == []
    world.request(d, "other", position=POSITION, content=ONE)
    with pytest.raises(HandoffConflictError):
        world.request(d, "other", position=POSITION, content=OTHER)


def test_a_refused_demand_leaves_p_not_waiting_for_ever() -> None:
    world, p, d = p_and_d()
    world.ready(p, content=ONE, lease_s=300.0)
    with pytest.raises(ContentMismatchError):
        world.request(d, position=POSITION, content=OTHER)
    world.wait(world.directory.limits.unasked_s + 0.1)
    assert ends(p) == [("EXPIRED", "NOT_ASKED_FOR")]
