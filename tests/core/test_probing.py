"""Costs are measured once for a pair of hosts; handoffs wait for that, but not for ever."""

from __future__ import annotations

import pytest

from core.world import LIMITS, Side, World, kinds
from restow.broker.core.common import actions as act
from restow.broker.core.common.events import Probed
from restow.broker.core.common.keys import HostPair
from restow.broker.core.handoffs.handoff import MAX_REASON
from restow.broker.planner import CopyCosts, ReadCosts

COPYING = CopyCosts(1e-4, 1e-6, 4e-9, 5e9)
SECONDS = 2e-6
HOSTS = HostPair("t", "host-p", "host-d")


def house(*, hosts: bool = True) -> tuple[World, Side, Side]:
    world = World(measures=True)
    names = ("host-p", "host-d") if hosts else ("", "")
    p, d = (world.engine(name, 2, host=host) for name, host in zip(("p", "d"), names, strict=True))
    return world, p, d


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


def test_a_first_handoff_waits_for_the_costs_and_others_find_them() -> None:
    world, p, d = house()
    world.begin(p, d)
    world.begin(p, d, "h2")
    (first,) = probes(world)
    assert (first.agent, first.peer) == (p.agents[0].key, None)
    assert first.size_bytes == p.agents[0].staging_bytes
    assert not world.orders(act.SendExecute)
    measured(world, p, d)
    _, second = probes(world)
    assert (second.agent, second.peer, second.address) == (d.agents[0].key, p.agents[0].key, 4096)
    assert len(world.orders(act.SendExecute)) == 4
    costs = world.directory.probing.known[HOSTS].costs
    assert costs is not None
    assert costs.seconds_per_stage == pytest.approx(0.002)  # of 3 ms the agent measured for one
    assert [one.costs for one in world.orders(act.MakePlan)] == [None, costs]
    told = [one.agent for one in world.orders(act.SendUnprobe)]
    assert told == [p.agents[0].key]
    world.begin(p, d, "h3")
    assert len(probes(world)) == 2
    assert len(world.orders(act.SendExecute)) == 6


def test_hosts_that_are_not_known_are_not_measured() -> None:
    world, p, d = house(hosts=False)
    world.begin(p, d)
    assert not probes(world)
    assert len(world.orders(act.SendExecute)) == 2


@pytest.mark.parametrize("who", ["source", "destination"])
def test_what_can_not_be_measured_is_planned_as_it_is(who: str) -> None:
    world, p, d = house()
    world.begin(p, d)
    number = probes(world)[0].number
    if who == "destination":
        answer(world, p, number)
    answer(world, p if who == "source" else d, number, reason="STAGING_EXHAUSTED")
    assert len(world.orders(act.SendExecute)) == 2
    assert world.directory.probing.known[HOSTS].failure == "STAGING_EXHAUSTED"
    world.begin(p, d, "h2")
    assert len(world.orders(act.SendExecute)) == 4
    count = len(probes(world))
    world.wait(LIMITS.probe_again_s + 1)
    world.begin(p, d, "h3")
    assert len(probes(world)) == count + 1


def test_an_agent_that_does_not_answer_is_not_waited_for() -> None:
    world, p, d = house()
    world.begin(p, d)
    world.wait(LIMITS.probe_s + 0.5)
    assert len(world.orders(act.SendExecute)) == 2
    assert world.directory.probing.known[HOSTS].failure == "TIMEOUT"
    answer(world, p, probes(world)[0].number)  # too late: it changes nothing
    assert kinds(world.sent).count("SendProbe") == 1


def test_hostile_figures_are_not_used() -> None:
    world, p, d = house()
    world.begin(p, d)
    number = probes(world)[0].number
    answer(world, p, number)
    wrong = Probed(number, 0, 0, COPYING, ReadCosts(float("nan"), -1.0), 0, "")
    world.run(lambda now_s: world.directory.reports.probed(d.agents[0], wrong, now_s))
    assert len(world.orders(act.SendExecute)) == 2
    assert "seconds_per_descriptor is nan" in world.directory.probing.known[HOSTS].failure


def test_memory_that_can_not_be_is_read_by_nobody() -> None:
    world, p, d = house()
    world.begin(p, d)
    held = Probed(probes(world)[0].number, 0, 1, COPYING, None, 0, "")
    world.run(lambda now_s: world.directory.reports.probed(p.agents[0], held, now_s))
    assert len(probes(world)) == 1
    assert world.directory.probing.known[HOSTS].failure == "ARGUMENT_INVALID"
    assert world.orders(act.SendExecute)


def test_of_a_long_reason_the_beginning_is_kept() -> None:
    world, p, d = house()
    world.begin(p, d)
    answer(world, p, probes(world)[0].number, reason="x" * 100_000)
    assert world.directory.probing.known[HOSTS].failure == "x" * MAX_REASON
    assert world.orders(act.SendExecute)
