"""Which of D's messages that say a demand are told its end."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from core.world import Side, alone, ends, kinds, p_and_d, packed
from restow.broker.core.common import actions as act
from restow.broker.core.common.events import Wish
from restow.broker.core.handoffs.demand import MAX_MESSAGES, DemandMessages
from restow.broker.errors import HandoffConflictError


def test_who_gives_a_demand_up_that_was_refused_leaves_the_first() -> None:
    # D's client may cancel its second demand of an id before it hears of the refusal.
    world, p, d = p_and_d()
    world.request(d)
    with pytest.raises(HandoffConflictError):
        world.request(d, blocks={"kv": [21, 22, 23], "state": [24]})
    assert world.cancel(d, demand=2) == []
    assert not world.find().ended
    world.publish(p)
    assert world.cancel(p, demand=1) == []
    assert kinds(world.cancel(d, demand=1)) == ["TellEnded", "TellEnded"]
    assert ends(d) == [("CANCELLED", "CANCELLED")]


def test_a_call_that_says_a_sessions_demand_again_leaves_its_number() -> None:
    # The session is told the end by its number; a call is told the end whatever the number is.
    world, d = alone("d")
    world.request(d)
    handoff = world.find()
    for said in (-1, 4, -2):
        world.request(d, repeated=True, number=said)
    assert handoff.demand_messages.numbers == (1, 4)


def told_numbers(side: Side, actions: Sequence[act.Action]) -> list[int]:
    return [
        one.demand
        for one in actions
        if isinstance(one, act.TellEnded) and one.engine == side.record.key
        if one.demand is not None
    ]


@pytest.mark.parametrize("away", [False, True])
def test_each_of_two_demands_that_are_said_again_is_told_the_end(away: bool) -> None:
    """Check a D that made a demand twice at an earlier broker, and heard no answer to either.

    ``away``: a rank of D may write still, so that D is told later.
    """
    world, p, d = p_and_d()
    for number in (7, 9):
        world.request(d, repeated=True, number=number)
    world.ready(p)
    if away:
        world.disconnect(d, 0)
        world.cancel(p)
        assert told_numbers(d, world.request(d, repeated=True, number=8)) == []
        world.connect(d, 0)
        assert told_numbers(d, d.told) == [7, 9, 8]
    else:
        assert told_numbers(d, world.settle(d, world.find().number)) == [7, 9]


def test_who_gives_one_of_two_demands_up_leaves_the_other_and_hears_of_its_end() -> None:
    world, p, d = p_and_d()
    for number in (7, 9):
        world.request(d, repeated=True, number=number)
    assert world.cancel(d, demand=7) == world.cancel(d, demand=7) == []
    world.ready(p)
    assert told_numbers(d, world.settle(d, world.find().number)) == [7, 9]
    for number in (7, 9):
        world.request(d, "other", repeated=True, number=number)
    assert world.cancel(d, "other", demand=9) == []
    assert told_numbers(d, world.cancel(d, "other", demand=7)) == [7, 9]


def test_who_asks_and_then_does_without_is_told_both_ends() -> None:
    world, d = alone("d")
    world.request(d)
    assert told_numbers(d, world.decline(d)) == [1, 2]


def test_a_demand_is_not_said_by_any_number_of_messages() -> None:
    """Check that what the broker keeps of a handoff is bounded."""
    world, d = alone("d")
    for number in range(1, MAX_MESSAGES + 1):
        world.request(d, repeated=number > 1, number=number)
    with pytest.raises(HandoffConflictError):
        world.request(d, repeated=True, number=99)
    world.request(d, repeated=True, number=MAX_MESSAGES)
    world.request(d, repeated=True, number=-1)
    assert world.find().demand_messages.numbers == tuple(range(1, MAX_MESSAGES + 1))


@pytest.mark.parametrize("numbers", [(0, -1), (-1, 0)])
def test_a_call_is_told_the_end_beside_a_session_that_numbers_nothing(
    numbers: tuple[int, int],
) -> None:
    # The end that the session is told has no number, and so is told to no call.
    world, d = alone("d")
    for number in numbers:
        wish = Wish((("kv", packed([11])),), 0, 30.0, repeated=True, demand=number)
        world.hear(world.directory.request(d.record, "h", wish, world.now_s))
    assert sorted(told_numbers(d, world.cancel(d))) == [-1, 0]


def test_who_is_not_told_any_more_gives_up_for_nobody_else() -> None:
    messages = DemandMessages((0, -1))
    assert not messages.give_up(-1)
    messages.add(5)
    assert not messages.give_up(5), "0 waits"
    assert messages.give_up(0)


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ((4, 0), (4, 0)),  # both are messages of sessions
        ((1, -1), (1,)),
        ((0, -1), (0, -1)),
        ((0, -1, -2), (0, -2)),
        ((-1, -2), (-2,)),
        ((-1, 4), (4,)),
        ((0, -1, 4), (0, 4)),
    ],
)
def test_of_the_calls_that_state_a_demand_the_latest_is_told_until_a_session_numbers_one(
    said: tuple[int, ...], kept: tuple[int, ...]
) -> None:
    messages = DemandMessages()
    assert all(messages.add(number) for number in said)
    assert messages.numbers == kept
