"""D hears of an end only when no rank of its can be writing any more; P does not wait for that."""

from __future__ import annotations

from typing import Any

import pytest

from core.world import LIMITS, Side, World, ends, reading
from restow.broker.core.common.limits import Limits
from restow.broker.errors import DirectoryFullError, QuotaExceededError, RestowError

READ_DEADLINE = [("FAILED", "READ_DEADLINE")]


def silent(limits: Limits = LIMITS) -> tuple[World, Side, Side, int]:
    """Return a handoff whose grant is over, while rank 1 of D has not been heard of."""
    world, p, d, number = reading(1, 2, limits=limits)
    world.settle(d, number, 0)
    world.wait(100)
    assert ends(p) == READ_DEADLINE
    assert ends(d) == []
    assert len(world.directory.ledger.quarantine) == 1
    return world, p, d, number


def test_d_hears_when_the_last_rank_has_reported() -> None:
    world, p, d, number = silent()
    world.wait(1000)
    assert ends(d) == []
    world.settle(d, number, 1)
    assert ends(p) == ends(d) == READ_DEADLINE
    assert not len(world.directory.ledger.quarantine)
    assert world.events()[-3:] == ["ended", "quarantined", "released"]


def test_d_hears_when_the_agent_has_said_hello_again() -> None:
    world, p, d, number = silent()
    world.connect(d, 0)
    assert ends(d) == []
    world.connect(d, 1)
    assert ends(p) == ends(d) == READ_DEADLINE
    assert world.settle(d, number, 1) == []


def test_who_asks_again_meanwhile_hears_nothing() -> None:
    world, p, d, number = silent()
    again = world.request(d, repeated=True, number=1)
    assert again == world.cancel(d) == world.decline(d) == []
    world.renew(p)
    assert ends(p) == 2 * READ_DEADLINE
    world.settle(d, number, 1)
    assert ends(d) == 2 * READ_DEADLINE, "of the demand, and of the decline"
    world.request(d, repeated=True, number=1)
    assert ends(d) == 3 * READ_DEADLINE


@pytest.mark.parametrize("how", ["replaced", "unregistered"])
def test_an_engine_that_goes_takes_its_pages_with_it(how: str) -> None:
    world, _, d, _ = silent()
    if how == "replaced":
        world.engine("d", 2)
    else:
        world.unregister(d)
    assert ends(d) == []
    assert not len(world.directory.ledger.quarantine)


@pytest.mark.parametrize(
    ("most", "error"),
    [({"max_live": 1}, DirectoryFullError), ({"tenant_max_live": 1}, QuotaExceededError)],
)
def test_what_is_held_counts_as_live(most: dict[str, Any], error: type[RestowError]) -> None:
    world, p, d, number = silent(Limits(settle_grace_s=0.5, **most))
    with pytest.raises(error):
        world.publish(p, "next")
    world.settle(d, number, 1)
    world.publish(p, "next")


def test_a_demand_of_an_earlier_broker_waits_for_agents_that_may_be_at_work_on_it() -> None:
    world = World()
    d = world.engine("d", 2, agents=False)
    world.connect(d, 0)
    world.request(d, "new", timeout_s=1.0)
    world.request(d, "known before", timeout_s=1.0, repeated=True)
    world.wait(2.0)
    assert [told.handoff_id for told in d.told] == ["new"]
    world.connect(d, 1)
    assert [told.handoff_id for told in d.told] == ["new", "known before"]
    # What P gave up meanwhile is known here before D asks again.
    world.engine("d", 1, agents=False)
    d, p = world.sides[d.record.key], world.engine("p")
    world.publish(p, "given up")
    world.cancel(p, "given up")
    world.request(d, "given up", repeated=True)
    assert d.told == []
    world.connect(d, 0)
    assert [told.handoff_id for told in d.told] == ["given up"]
    world.request(d, "asked now", timeout_s=1.0, repeated=True)
    world.wait(2.0)
    assert len(d.told) == 2


def test_d_that_gave_up_while_it_heard_nothing_is_told_again_when_it_cancels() -> None:
    # Its session was broken when the last rank reported, so the first word was lost.
    world, _, d, number = silent()
    assert world.cancel(d, demand=1) == [], "rank 1 may still write"
    world.settle(d, number, 1)
    world.cancel(d, demand=1)
    assert ends(d) == 2 * READ_DEADLINE
    assert d.told[-1].demand == 1
