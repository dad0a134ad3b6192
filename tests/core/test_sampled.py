"""The token that P sampled: D hears it when both sides' words fit, before its state is there."""

from __future__ import annotations

from typing import Any

import pytest

from core.world import POSITION, Side, World, ends, of_kind, p_and_d
from restow.broker.core.common import actions as act
from restow.broker.core.common.keys import State
from restow.broker.errors import HandoffConflictError

TOKEN = 4711
CONTENT, OTHER = b"content of 16 b.", b"other content 16"


def heard(actions: list[act.Action]) -> list[tuple[str, int, int]]:
    """Return which engine was told which token, by which of its messages."""
    told = of_kind(act.TellSampled, actions)
    return [(one.engine.engine_id, one.demand, one.token) for one in told]


def ask(world: World, d: Side, number: int = 7, **more: Any) -> list[act.Action]:
    said = {"position": POSITION, "content": CONTENT, "takes_sampled": True, **more}
    return world.request(d, number=number, **said)


def publish(world: World, p: Side, **more: Any) -> list[act.Action]:
    return world.publish(p, **{"content": CONTENT, "sampled_token": TOKEN, **more})


def test_d_that_waits_hears_it_before_a_rank_has_fenced() -> None:
    world, p, d = p_and_d(2)
    assert not heard(ask(world, d))
    assert heard(publish(world, p)) == [("d", 7, TOKEN)]
    actions = world.fence_all(p)
    assert not heard(actions)
    number = of_kind(act.SendExecute, actions)[0].handoff
    assert not heard(world.settle(d, number))
    assert ends(d) == [("DONE", "")]


def test_d_that_asks_late_hears_it_at_once() -> None:
    world, p, d = p_and_d(2)
    publish(world, p)
    world.fence_all(p)
    assert heard(ask(world, d)) == [("d", 7, TOKEN)]


def test_the_token_with_the_number_0_is_one() -> None:
    world, p, d = p_and_d(2)
    ask(world, d)
    assert heard(publish(world, p, sampled_token=0)) == [("d", 7, 0)]


def test_a_chunk_that_is_not_the_last_says_none() -> None:
    world, p, d = p_and_d(2)
    ask(world, d)
    assert not heard(publish(world, p, final=False))
    assert heard(publish(world, p)) == [("d", 7, TOKEN)]


def test_d_that_samples_itself_hears_nothing() -> None:
    world, p, d = p_and_d(2)
    ask(world, d, takes_sampled=False)
    assert not heard(publish(world, p) + world.fence_all(p))
    assert world.find().state is State.READING


def test_a_state_without_one_is_none_for_d() -> None:
    world, p, d = p_and_d(2)
    ask(world, d)
    assert not heard(publish(world, p, sampled_token=None) + world.fence_all(p))
    assert ends(d) == [("FAILED", "NOT_SAMPLED")]


@pytest.mark.parametrize(
    ("more", "reason"),
    [({"content": OTHER}, "CONTENT_MISMATCH"), ({"position": POSITION - 1}, "POSITION_MISMATCH")],
)
def test_what_does_not_fit_is_not_told(more: dict[str, Any], reason: str) -> None:
    world, p, d = p_and_d(2)
    ask(world, d, **more)
    assert not heard(publish(world, p) + world.fence_all(p))
    assert ends(d) == [("FAILED", reason)]


def test_d_that_comes_back_hears_it_again() -> None:
    world, p, d = p_and_d(2)
    ask(world, d)
    publish(world, p)
    assert heard(ask(world, d, repeated=True)) == [("d", 7, TOKEN)]


def test_d_that_comes_back_after_the_end_hears_it_before_that() -> None:
    world, p, d = p_and_d(2)
    ask(world, d)
    publish(world, p)
    number = of_kind(act.SendExecute, world.fence_all(p))[0].handoff
    world.settle(d, number)
    sampled, ended = ask(world, d, repeated=True)
    assert heard([sampled]) == [("d", 7, TOKEN)]
    assert isinstance(ended, act.TellEnded)


def test_each_of_several_readers_hears_it() -> None:
    world, p, d = p_and_d(2)
    other = world.engine("e")
    ask(world, d, readers=2)
    ask(world, other, number=9, readers=2)
    assert heard(publish(world, p, readers=2)) == [("d", 7, TOKEN), ("e", 9, TOKEN)]


def test_it_comes_though_the_broker_drains() -> None:
    # The state comes from the next broker; the token is the same.
    world, p, d = p_and_d(2)
    ask(world, d)
    world.run(lambda now_s: world.directory.granting.drain(True, now_s))
    assert heard(publish(world, p)) == [("d", 7, TOKEN)]


def test_a_publication_said_again_with_another_token_is_another_state() -> None:
    world, p, _ = p_and_d(2)
    publish(world, p)
    publish(world, p, repeated=True)
    with pytest.raises(HandoffConflictError, match=r"differs in .*sampled token"):
        publish(world, p, repeated=True, sampled_token=TOKEN + 1)
    with pytest.raises(HandoffConflictError, match=r"differs in .*sampled token"):
        publish(world, p, repeated=True, sampled_token=None)


def test_the_next_d_hears_it_too_when_the_first_is_refused() -> None:
    world, p, d = p_and_d(2)
    e = world.engine("e")
    ask(world, d, held=POSITION + 1)
    assert heard(publish(world, p)) == [("d", 7, TOKEN)]
    world.fence_all(p)
    assert ends(d) == [("FAILED", "ARGUMENT_INVALID")]
    assert heard(ask(world, e)) == [("e", 7, TOKEN)]
