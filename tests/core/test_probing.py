"""Costs are measured in the background; no handoff waits for them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.world import LIMITS, Side, World, kinds, pair_plan
from restow.broker.core.common import actions as act
from restow.broker.core.common.events import Probed
from restow.broker.core.common.keys import HostPair
from restow.broker.core.engines.agent import CUDA_MEMORY
from restow.broker.core.handoffs.handoff import MAX_REASON
from restow.broker.planner import CopyCosts, CostModel, ReadCosts

COPYING = CopyCosts(1e-4, 1e-6, 4e-9, 5e9)
SECONDS = 2e-6
HOSTS = HostPair("t", "host-p", "host-d")


UNPREPARED = replace(LIMITS, pairs_ahead=0)


def house(*, hosts: bool = True) -> tuple[World, Side, Side]:
    """Return a P and a D for which nothing is prepared before their first handoff."""
    world = World(measures=True, limits=UNPREPARED)
    names = ("host-p", "host-d") if hosts else ("", "")
    p, d = (world.engine(name, 2, host=host) for name, host in zip(("p", "d"), names, strict=True))
    return world, p, d


def hand_over(world: World, p: Side, d: Side, name: str = "h") -> None:
    """Let a handoff begin and end, and give the broker time to begin a measurement."""
    number = world.begin(p, d, name)
    world.settle_all(d, number)
    for _ in range(3):
        world.wait(0.02)


def measure(world: World, p: Side, d: Side) -> None:
    """Begin a measurement, as between engines that have handed over and are idle."""
    plan = pair_plan(1, 1, False, False)
    begun = world.directory.probing.measure(p.record, d.record, plan, world.now_s)
    assert begun
    world.hear(begun)


def probes(world: World) -> list[act.SendProbe]:
    return world.orders(act.SendProbe)


def answer(
    world: World, side: Side, number: int, rank: int = 0, reason: str = "", seconds: float = 0.0
) -> None:
    """Have an agent answer a probe; a reader that needs ``seconds`` for a descriptor has read."""
    reading = ReadCosts(seconds, 7e9) if seconds else None
    probed = Probed(number, 4096, 1 << 20, COPYING, reading, 1000, reason)
    agent = side.agents[rank]
    world.run(lambda now_s: world.directory.reports.probed(agent, probed, now_s))


def measured(world: World, p: Side, d: Side) -> None:
    number = probes(world)[-1].number
    world.now_s += 0.003
    answer(world, p, number)
    answer(world, d, number, seconds=SECONDS)


def test_a_first_handoff_waits_for_no_costs_and_later_ones_use_them() -> None:
    world, p, d = house()
    world.begin(p, d)
    assert not probes(world)
    assert len(world.orders(act.SendExecute)) == 2, "granted at once"
    world.settle_all(d, world.find().number)
    world.wait(0.02)
    (first,) = probes(world)
    assert (first.agent, first.peer) == (p.agents[0].key, None)
    assert first.size_bytes == p.agents[0].staging_bytes
    measured(world, p, d)
    _, second = probes(world)
    assert (second.agent, second.peer, second.address) == (d.agents[0].key, p.agents[0].key, 4096)
    told = [sent.agent for sent in world.orders(act.SendUnprobe)]
    assert told == [p.agents[0].key]
    costs = world.directory.probing.known[HOSTS].costs
    assert costs is not None
    assert costs.seconds_per_stage == pytest.approx(0.002)  # of 3 ms the agent measured for one
    # Until the plan for these costs is made, the present plan serves.
    world.plans_at_once = False
    world.begin(p, d, "h2")
    assert world.find("h2").granted
    world.wait(0.02)
    assert [(made.costs, made.ahead) for made in world.orders(act.MakePlan)] == [
        (None, False),
        (costs, True),
    ]
    world.plan()
    hand_over(world, p, d, "h3")
    assert len(probes(world)) == 2
    assert len(world.orders(act.MakePlan)) == 2


def test_a_pair_begins_with_the_costs_of_similar_hosts() -> None:
    world, p, d = house()
    hand_over(world, p, d)
    measured(world, p, d)
    world.wait(0.02)
    plans = len(world.orders(act.MakePlan))
    for number, host in enumerate(("host-e", "host-p"), 1):
        name = f"e{number}"
        other = world.engine(name, 2, host=host)
        _, at_hand = world.directory.probing.at_hand(p.record, other.record)
        assert at_hand == (HOSTS if number == 1 else None), "reads inside of a host are not similar"
        hand_over(world, p, other, name)
        assert len(world.orders(act.MakePlan)) == plans, "the same plan serves"
        assert len(probes(world)) == 2 * number + 1, "each pair is measured all the same"
        measured(world, p, other)
        world.wait(0.02)
        plans += 1
        assert world.orders(act.MakePlan)[-1].pair.hosts == HostPair("t", "host-p", host)


def test_costs_that_come_while_a_plan_is_made_have_no_second_plan_waited_for() -> None:
    world, p, d = house()
    world.plans_at_once = False
    world.begin(p, d)
    measure(world, p, d)
    measured(world, p, d)
    world.begin(p, d, "h2")
    assert len(world.orders(act.MakePlan)) == 1
    world.plan()
    assert world.find("h").granted
    assert world.find("h2").granted


def test_costs_that_were_forgotten_are_nobodys() -> None:
    world = World(measures=True, limits=replace(UNPREPARED, max_pairs=1))
    p, d, near, other = (
        world.engine(name, host=host) for name, host in zip("pdno", "xyxz", strict=True)
    )
    for reader in (d, near):  # the second kind of pair takes the place of the first
        measure(world, p, reader)
        measured(world, p, reader)
    assert len(world.directory.probing.known) == 1
    assert world.directory.probing.at_hand(p.record, other.record)[1] is None


def test_hosts_are_those_of_the_first_ranks() -> None:
    world, p, d = house()
    world.connect(d, 1, host="host-of-another-rank")
    assert world.directory.probing.at_hand(p.record, d.record)[0] == HOSTS
    world.connect(d, 0, host="moved")
    assert world.directory.probing.at_hand(p.record, d.record)[0] == HOSTS._replace(
        destination_host="moved"
    )


@pytest.mark.parametrize("sides", ["pd", "p", "d", ""])
def test_between_devices_other_costs_hold_until_they_are_measured(sides: str) -> None:
    world = World(measures=True)
    p, d = (
        world.engine(name, host=name, memory=CUDA_MEMORY if name in sides else 1) for name in "pd"
    )
    world.begin(p, d)
    (made,) = world.orders(act.MakePlan)
    assert made.costs == (CostModel.of_devices() if sides == "pd" else None)
    assert made.pair.on_devices == (sides == "pd")


def test_a_plan_for_hosts_does_not_serve_devices() -> None:
    world = World(measures=True, limits=UNPREPARED)
    for life, memory in enumerate((1, CUDA_MEMORY)):
        p, d = (world.engine(f"{name}{life}", host="host", memory=memory) for name in "pd")
        world.begin(p, d, f"h{life}")
    costs = [made.costs for made in world.orders(act.MakePlan)]
    assert costs == [None, CostModel.of_devices()]


def test_an_operators_costs_hold_for_devices_too() -> None:
    world = World(measures=False)
    p, d = (world.engine(name, host=name, memory=CUDA_MEMORY) for name in "pd")
    world.begin(p, d)
    assert [made.costs for made in world.orders(act.MakePlan)] == [None]


def test_a_pair_that_always_reads_is_measured_all_the_same() -> None:
    world, p, d = house()
    numbers = [world.begin(p, d, "0")]
    for at in range(1, 130):
        numbers.append(world.begin(p, d, str(at)))
        world.settle_all(d, numbers.pop(0))
        world.wait(0.1)
        if at < 90:
            assert not probes(world), at
    assert probes(world)


def test_a_plan_for_which_there_is_no_room_is_not_made_again_and_again() -> None:
    world, p, d = house()
    hand_over(world, p, d)
    measured(world, p, d)
    account = world.directory.ledger.tenants.account("t")
    account.limit_bytes = account.size_bytes + 10_000
    for at in range(20):
        hand_over(world, p, d, f"more-{at}")
    assert len(world.orders(act.MakePlan)) == 2
    assert len(world.directory.plans.known) == 1
    account.limit_bytes = None
    world.wait(LIMITS.probe_again_s)
    hand_over(world, p, d, "last")
    assert len(world.directory.plans.known) == 2


def test_hosts_that_are_not_known_are_not_measured() -> None:
    world, p, d = house(hosts=False)
    hand_over(world, p, d)
    assert not probes(world)
    assert len(world.orders(act.SendExecute)) == 2


@pytest.mark.parametrize("who", ["source", "destination"])
def test_what_cannot_be_measured_is_planned_as_it_is(who: str) -> None:
    world, p, d = house()
    hand_over(world, p, d)
    number = probes(world)[0].number
    if who == "destination":
        answer(world, p, number)
    answer(world, p if who == "source" else d, number, reason="STAGING_EXHAUSTED")
    assert world.directory.probing.known[HOSTS].failure == "STAGING_EXHAUSTED"
    count = len(probes(world))
    hand_over(world, p, d, "h2")
    assert len(world.orders(act.SendExecute)) == 4
    assert len(world.orders(act.MakePlan)) == 1
    assert len(probes(world)) == count
    world.wait(LIMITS.probe_again_s + 1)
    hand_over(world, p, d, "h3")
    assert len(probes(world)) == count + 1


def test_an_agent_that_does_not_answer_is_not_waited_for() -> None:
    world, p, d = house()
    hand_over(world, p, d)
    world.wait(LIMITS.probe_s + 0.5)
    assert world.directory.probing.known[HOSTS].failure == "TIMEOUT"
    answer(world, p, probes(world)[0].number)  # too late: it changes nothing
    assert kinds(world.sent).count("SendProbe") == 1


@pytest.mark.parametrize("who", ["source", "destination"])
def test_an_agent_that_leaves_during_a_measurement_leaves_no_failure(who: str) -> None:
    world, p, d = house()
    hand_over(world, p, d)
    world.disconnect(p if who == "source" else d, 0)
    world.wait(0.02)
    assert not world.directory.probing.known
    world.connect(p if who == "source" else d, 0, host="host-p" if who == "source" else "host-d")
    world.wait(LIMITS.probe_again_s)
    hand_over(world, p, d, "h2")
    assert len(probes(world)) == 2


def test_nothing_is_sent_to_a_reader_that_left_or_was_replaced() -> None:
    for replaced in (False, True):
        world, p, d = house()
        hand_over(world, p, d)
        if replaced:
            world.connect(d, 0, host="host-d")
        else:
            world.disconnect(d, 0)
        answer(world, p, probes(world)[0].number)
        assert len(probes(world)) == 1


def test_hostile_figures_are_not_used() -> None:
    world, p, d = house()
    hand_over(world, p, d)
    number = probes(world)[0].number
    answer(world, p, number)
    wrong = Probed(number, 0, 0, COPYING, ReadCosts(float("nan"), -1.0), 0, "")
    world.run(lambda now_s: world.directory.reports.probed(d.agents[0], wrong, now_s))
    assert "seconds_per_descriptor is nan" in world.directory.probing.known[HOSTS].failure
    hand_over(world, p, d, "h2")
    assert [made.costs for made in world.orders(act.MakePlan)] == [None]


def test_memory_that_cannot_be_is_read_by_nobody() -> None:
    world, p, d = house()
    hand_over(world, p, d)
    held = Probed(probes(world)[0].number, 0, 1, COPYING, None, 0, "")
    world.run(lambda now_s: world.directory.reports.probed(p.agents[0], held, now_s))
    assert len(probes(world)) == 1
    assert world.directory.probing.known[HOSTS].failure == "ARGUMENT_INVALID"


def test_of_a_long_reason_the_beginning_is_kept() -> None:
    world, p, d = house()
    hand_over(world, p, d)
    answer(world, p, probes(world)[0].number, reason="x" * 100_000)
    assert world.directory.probing.known[HOSTS].failure == "x" * MAX_REASON
