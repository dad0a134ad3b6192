"""Plans are made and costs measured when engines come: a first handoff waits for neither."""

from __future__ import annotations

import pytest

from core.test_probing import HOSTS, SECONDS, answer, probes
from core.world import LIMITS, World, alone, layout
from restow.broker.core.ahead import MAX_QUEUED
from restow.broker.core.common import actions as act
from restow.broker.core.common.limits import Limits
from restow.broker.core.common.pair import PAIR_BYTES, PairRefused
from restow.broker.errors import PlanError
from restow.broker.layout import Model
from restow.broker.layout.values import Layout


def house(sides: str = "PD", *, limits: Limits = LIMITS, staged: bool = False) -> World:
    world = World(measures=True, limits=limits, staged=staged)
    for name in sides:
        world.engine(name.lower(), 1 + (name == "D"), host=f"host-{name.lower()}", sides=name)
    return world


def settle_down(world: World) -> None:
    """Let the clock tick until nothing more is measured ahead, and answer every measurement."""
    answered = len(probes(world))
    for _ in range(4 * MAX_QUEUED):
        if not len(world.directory.ahead):
            return
        world.wait(0.02)
        if len(probes(world)) > answered:
            measured_between(world)
            answered = len(probes(world))
    raise AssertionError("it never comes to an end")


def measured_between(world: World) -> None:
    """Have both agents of the latest measurement answer."""
    source = world.sides[probes(world)[-1].agent.engine]
    number = probes(world)[-1].number
    answer(world, source, number)
    answer(world, world.sides[probes(world)[-1].agent.engine], number, seconds=SECONDS)


@pytest.mark.parametrize("staged", [False, True])
def test_a_first_handoff_sends_orders_and_nothing_else(staged: bool) -> None:
    world = house(staged=staged)
    settle_down(world)
    assert world.directory.probing.known[HOSTS].costs is not None
    assert [made.ahead for made in world.orders(act.MakePlan)] == [True, True]
    p, d = world.side("p"), world.side("d")
    before = len(world.sent)
    world.begin(p, d)
    if staged:
        world.stage_all(p, world.find().number, 2)
    assert {type(sent) for sent in world.sent[before:]} <= {act.SendStage, act.SendExecute}
    assert len(world.orders(act.SendExecute)) == 2
    assert "waits for a plan" not in world.events()


def test_engines_that_say_no_side_are_planned_for_and_show_nobody_their_memory() -> None:
    world = World(measures=True)
    for name in "pd":
        world.engine(name, 1 + (name == "d"), host=f"host-{name}")
    settle_down(world)
    assert len(world.orders(act.MakePlan)) == 2  # either may be P
    assert not probes(world)
    assert not world.orders(act.SendPeer)


def test_only_p_is_read_also_of_engines_that_were_replaced() -> None:
    world = house("PDDPD")
    settle_down(world)
    assert {
        (one.pair.source_digest, one.pair.destination_digest) for one in world.orders(act.MakePlan)
    } == {(world.side("p").record.layout_digest, world.side("d").record.layout_digest)}
    readers = {one.agent.engine.engine_id for one in world.sent if isinstance(one, act.SendPeer)}
    assert readers == {"d"}


def test_replicas_share_a_plan_and_hosts_a_measurement() -> None:
    world = World(measures=True)
    for number in range(10):
        for name in "pd":
            world.engine(
                f"{name}{number}", 1 + (name == "d"), host=f"host-{name}", sides=name.upper()
            )
    settle_down(world)
    assert len(world.orders(act.MakePlan)) == 2  # without the costs, and with them
    assert len(probes(world)) == 2


def test_what_requests_wait_for_comes_first() -> None:
    world = World()
    world.plans_at_once = False
    p, d = world.engine("p", 1, sides="P"), world.engine("d", 1, sides="D")
    world.engine("d2", 2, sides="D")
    world.begin(p, d)
    (asked,) = world.orders(act.MakePlan)
    assert not asked.ahead
    world.wait(0.02)
    world.wait(0.02)
    assert world.orders(act.MakePlan) == [asked]
    world.plan()
    assert world.find().granted
    world.wait(0.02)
    world.wait(0.02)
    assert [one.ahead for one in world.orders(act.MakePlan)] == [False, True]
    # One at a time; a handoff that needs it meanwhile waits for that one, and has no other made.
    world.begin(p, world.side("d2"), "h2")
    assert len(world.orders(act.MakePlan)) == 2
    world.plan()
    assert world.find("h2").granted


def test_agents_that_read_are_not_measured_meanwhile() -> None:
    world = house("PD")
    settle_down(world)
    world.engine("d2", 2, host="host-d2", sides="D")
    p, d = world.side("p"), world.side("d")
    world.begin(p, d)
    handoff = world.find()
    assert handoff.granted
    count = len(probes(world))
    for _ in range(20):
        world.wait(0.02)
    assert len(probes(world)) == count
    world.settle_all(d, handoff.number)
    settle_down(world)
    assert len(probes(world)) == count + 2


def test_a_refusal_is_said_to_nobody_and_kept_by_nobody() -> None:
    world = World()
    world.outcome = PairRefused(PlanError("these two do not fit"))
    p, d = world.engine("p", 1, sides="P"), world.engine("d", 2, sides="D")
    settle_down(world)
    assert len(world.orders(act.MakePlan)) == 1
    assert not world.directory.plans.known
    assert not p.told + d.told
    world.begin(p, d)
    assert d.told[0].reason == "PLAN_INVALID"


def test_other_pools_and_tenants_are_none_of_it() -> None:
    world = World()
    other = Layout(Model("other", ()), layout(2).ranks)
    world.engine("p", 1, sides="P")
    world.engine("d", 2, sides="D", shape=other)
    world.engine("d", 2, sides="D", tenant="u")
    settle_down(world)
    assert not world.orders(act.MakePlan)


def test_engines_that_leave_or_drain_are_planned_for_no_more() -> None:
    world = World()
    world.engine("p", 1, sides="P")
    gone, draining = (world.engine(f"d{n}", n, sides="D") for n in (2, 3))
    world.unregister(gone)
    world.drain_engine(draining)
    settle_down(world)
    assert not world.orders(act.MakePlan)


def test_one_that_comes_brings_no_more_than_its_bound() -> None:
    world = World(limits=Limits(pairs_ahead=3))
    for number in range(1, 10):
        world.engine(f"d{number}", number, sides="D")
    world.engine("p", 1, sides="P")
    settle_down(world)
    assert len(world.orders(act.MakePlan)) == 3


def test_a_tenant_that_has_little_room_keeps_it_for_its_handoffs() -> None:
    world = World()
    account = world.directory.ledger.tenants.account("t")
    p, d = world.engine("p", 1, sides="P"), world.engine("d", 2, sides="D")
    account.limit_bytes = 2 * (account.size_bytes + PAIR_BYTES) - 1
    settle_down(world)
    assert len(world.orders(act.MakePlan)) == 1
    assert not world.directory.plans.known
    account.limit_bytes = None
    world.begin(p, d)
    assert world.find().granted


def test_of_many_plans_the_one_that_was_not_used_longest_is_forgotten() -> None:
    world, p = alone("p", 1, limits=Limits(max_pairs=2, pairs_ahead=0))
    for number in (2, 3):
        world.begin(p, world.engine(f"d{number}", number), f"h{number}")
    world.begin(p, world.side("d2"), "again")
    world.begin(p, world.engine("d4", 4), "h4")
    count = len(world.orders(act.MakePlan))
    world.begin(p, world.side("d2"), "once more")
    assert len(world.orders(act.MakePlan)) == count
    world.begin(p, world.side("d3"), "forgotten")
    assert len(world.orders(act.MakePlan)) == count + 1


def test_a_broker_that_drains_plans_nothing_ahead() -> None:
    world = World()
    world.drain(True)
    world.engine("p", 1, sides="P")
    world.engine("d", 2, sides="D")
    world.wait(1.0)
    assert not world.orders(act.MakePlan)
    world.drain(False)
    settle_down(world)
    assert len(world.orders(act.MakePlan)) == 1


def test_what_is_known_uses_up_none_of_the_bound() -> None:
    world = World(limits=Limits(pairs_ahead=1))
    for number in (2, 3):
        world.engine(f"d{number}", number, sides="D")
    p = world.engine("p", 1, sides="P")
    settle_down(world)
    assert len(world.orders(act.MakePlan)) == 1
    world.connect(p, 0)
    settle_down(world)
    assert len(world.orders(act.MakePlan)) == 2
