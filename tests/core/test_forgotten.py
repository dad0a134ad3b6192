"""Engines that are gone are forgotten, and hear how their handoffs ended if they come back."""

from __future__ import annotations

import pytest

from core.world import Side, World, ends, kinds
from restow.broker.core.common import actions as act
from restow.broker.errors import HandoffOwnedError

GONE_S = 41.0
"""An agent may come back for 10 s, and what is left is forgotten after 30 s."""


def reading(ranks: int = 1) -> tuple[World, Side, Side]:
    """Return a P, and a D that has been told to read from P."""
    world = World()
    p, d = world.engine("p"), world.engine("d", ranks)
    world.publish(p)
    world.fence_all(p)
    world.request(d)
    return world, p, d


def die(world: World, *sides: Side) -> None:
    """Disconnect all agents of the sides: processes are killed, and nobody unregisters."""
    for side in sides:
        for rank in list(side.agents):
            world.disconnect(side, rank)


def test_a_killed_engine_is_gone_in_less_than_a_minute() -> None:
    world = World()
    p = world.engine("p", ranks=2)
    world.publish(p)
    world.fence_all(p)
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
    world = World()
    p = world.engine("p")
    world.publish(p)
    world.fence_all(p)
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
    world, p, d = reading(ranks=2)
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
