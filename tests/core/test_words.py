"""Words that concern another stream or an ended handoff, and names that are none."""

from __future__ import annotations

import pytest

from core.world import Side, World, ends
from restow.broker.core.common.keys import EngineKey, State
from restow.broker.errors import RequestError


def reading(world: World) -> tuple[Side, Side, int]:
    """Return a handoff from two ranks to two, whose ranks were told to read."""
    p, d = world.engine("p", 2), world.engine("d", 2)
    world.publish(p)
    world.fence_all(p)
    world.request(d)
    return p, d, world.find().number


def test_a_report_that_arrives_behind_the_end_of_its_stream_changes_nothing() -> None:
    world = World()
    p, d, number = reading(world)
    world.settle(d, number, 0)
    world.disconnect(d, 1)
    assert world.settle(d, number, 1) == []
    assert p.told == d.told == []


def test_what_has_ended_is_not_released_again() -> None:
    world = World()
    p, d, number = reading(world)
    world.settle(d, number, 0)
    world.settle(d, number, 1)
    assert world.release(world.find()) == []
    assert ends(p) == ends(d) == [("DONE", "")]
    assert world.find().state is State.DONE


@pytest.mark.parametrize(
    ("engine_id", "incarnation"), [("", "1"), ("p", ""), ("p" * 257, "1"), ("p", "1" * 257)]
)
def test_names_of_engines_have_sensible_lengths(engine_id: str, incarnation: str) -> None:
    world = World()
    shape = world.engine("other").record.layout
    with pytest.raises(RequestError, match="1 to 256 printable characters"):
        world.directory.members.register(
            EngineKey("t", engine_id), incarnation, shape, "digest", world.now_s
        )
