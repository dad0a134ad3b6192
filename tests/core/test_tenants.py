"""Tenants know nothing of each other, and nobody holds more than its quota."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from core.test_probing import answer, measure, probes
from core.world import LIMITS, Side, World, ends, of_kind, pair_plan
from restow.broker.core.common import actions as act
from restow.broker.core.common.keys import AgentKey, HostPair, State
from restow.broker.core.common.pair import PairPlan
from restow.broker.errors import (
    AgentMismatchError,
    EngineUnknownError,
    HandoffUnknownError,
    QuotaExceededError,
    RestowError,
)


def pair_of(world: World, tenant: str, *, host: str = "", ranks: int = 1) -> tuple[Side, Side]:
    """Return P and D of a tenant, with names that every tenant has."""
    p, d = (world.engine(name, ranks, tenant=tenant, host=host) for name in ("p", "d"))
    return p, d


def hand_over(world: World, p: Side, d: Side, name: str = "h") -> None:
    world.settle_all(d, world.begin(p, d, name))


def outcome(word: Callable[[], object]) -> object:
    """Return the outcome of a word: an error with all that it says, or what the word returns."""
    try:
        return word()
    except RestowError as error:
        return type(error), error.message, error.subject


# -- what a tenant can learn ----------------------------------------------------------------------


def words_of(world: World, side: Side) -> list[Callable[[], object]]:
    """Return all that an engine and its agent can say of another tenant's handoff ``h``."""
    members, ledger = world.directory.members, world.directory.ledger
    key = side.record.key
    return [
        lambda: members.engine(key._replace(engine_id="p-of-a"), "life1"),
        lambda: ledger.find(key.tenant, "h"),
        lambda: world.renew(side),
        lambda: world.cancel(side),
        lambda: world.publish(side, blocks={"kv": [21, 22, 23], "state": [24]}),
        lambda: world.fence(side),
        lambda: world.cancel(side),
        lambda: world.request(side, "i", blocks={"kv": [21, 22, 23], "state": [24]}),
        lambda: world.decline(side, "j"),
    ]


@pytest.mark.parametrize("stage", ["published", "asked for", "being read", "ended"])
def test_a_tenant_learns_nothing_of_the_handoff_of_another(stage: str) -> None:
    heard = []
    for others_are_there in (False, True):
        world = World()
        mine = world.engine("e", tenant="b")
        if others_are_there:
            p, d = world.engine("p-of-a", tenant="a"), world.engine("d-of-a", tenant="a")
            for name in ("h", "i", "j"):
                world.publish(p, name) if stage != "asked for" else world.request(d, name)
                if stage in ("being read", "ended"):
                    world.fence_all(p, name)
                    world.request(d, name)
                if stage == "ended":
                    world.settle(d, world.find(name, "a").number)
            before = [repr(vars_of(world, name)) for name in ("h", "i", "j")]
        heard.append([outcome(word) for word in words_of(world, mine)])
        if others_are_there:
            assert [repr(vars_of(world, name)) for name in ("h", "i", "j")] == before
    assert heard[0] == heard[1]
    assert isinstance(heard[0][0], tuple)
    assert heard[0][0][0] is EngineUnknownError
    assert [one[0] for one in heard[0][1:4] if isinstance(one, tuple)] == [HandoffUnknownError] * 3


def vars_of(world: World, name: str) -> dict[str, object]:
    handoff = world.find(name, "a")
    kept = ("state", "publication", "demand", "unsettled", "failure", "timeline")
    return {field: getattr(handoff, field) for field in kept} | {"fenced": handoff.side.fenced}


def test_two_tenants_may_use_one_id() -> None:
    world = World()
    (p, d), (q, e) = pair_of(world, "a"), pair_of(world, "b")
    world.publish(p)
    world.publish(q, blocks={"kv": [5, 6, 7], "state": [8]})
    hand_over(world, p, d)
    assert ends(p) == ends(d) == [("DONE", "")]
    assert not ends(q)
    assert not ends(e)
    assert world.find("h", "b").state is State.WAITING


def test_an_agent_can_not_report_on_the_handoff_of_another_tenant() -> None:
    world = World(staged=True)
    (p, d), (q, e) = pair_of(world, "a"), pair_of(world, "b")
    world.ready(p)
    world.request(d)
    number = world.find("h", "a").number
    unknown = number + 1
    for settled in (number, unknown):
        assert world.settle(e, settled) == []
    for one in (number, unknown):
        assert world.stage(q, one) == [act.SendUnstage(q.agents[0].key, one)]
    assert world.find("h", "a").state is State.STAGING
    world.stage(p, number)
    world.settle(d, number)
    assert ends(d) == [("DONE", "")]


def test_numbers_do_not_tell_how_much_others_do() -> None:
    seen = []
    for others in (0, 100):
        world = World()
        mine, other = world.engine("e", tenant="b"), world.engine("e", tenant="a")
        world.publish(mine, "one")
        world.now_s += 0.001
        for index in range(others):
            world.decline(other, f"h{index}")
        world.now_s += 0.001
        world.publish(mine, "two")
        seen.append([world.find(name, "b").number for name in ("one", "two")])
    assert seen[0] == seen[1]


def test_tenants_may_have_agents_of_one_name() -> None:
    world = World()
    (p, d), (q, e) = pair_of(world, "a"), pair_of(world, "b")
    for side in (p, q):
        world.connect(side, 0, name="same")
    with pytest.raises(AgentMismatchError, match="in use"):
        world.connect(d, 0, name="same")
    hand_over(world, p, d)
    hand_over(world, q, e)
    world.disconnect(p, 0)
    told = world.wait(world.directory.limits.agent_wait_s + 1.0)
    assert of_kind(act.SendForget, told) == [act.SendForget(d.agents[0].key, "same")]


# -- who is given the right to read ---------------------------------------------------------------


def introductions(world: World) -> list[tuple[AgentKey, AgentKey]]:
    """Return which agent was told of which peer's memory, in whatever message."""
    return [
        (one.agent, one.peer)
        for one in world.sent
        if isinstance(one, act.SendPeer | act.SendProbe) and one.peer is not None
    ]


@pytest.mark.parametrize("staged", [False, True])
def test_nobody_is_told_of_memory_before_a_grant(staged: bool) -> None:
    world = World(staged=staged)
    p, d = pair_of(world, "a", ranks=2)
    world.request(d)
    world.publish(p, blocks={"kv": [1, 2]}, position=0, final=False)
    world.fence(p, 0)
    world.publish(p, blocks={"kv": [3]}, first=2, final=False)
    world.publish(p, blocks={"state": [4]})
    assert not introductions(world)
    world.fence(p, 1)
    if staged:
        number = world.find("h", "a").number
        for src_rank in range(2):
            assert not introductions(world)
            world.stage(p, number, src_rank, dst_rank=1)
        # Only the rank whose reading is about to begin.
        assert {reader for reader, _ in introductions(world)} == {d.agents[1].key}
        return
    assert len(introductions(world)) == 4


def test_hosts_are_measured_by_each_tenant_for_itself() -> None:
    world = World(measures=True)
    (p, d), (q, e) = (pair_of(world, tenant, host="shared") for tenant in ("a", "b"))
    for source, destination in ((p, d), (q, e)):
        measure(world, source, destination)
    first, second = probes(world)
    assert (first.agent, second.agent) == (p.agents[0].key, q.agents[0].key)
    assert not introductions(world)
    answer(world, e, first.number)  # what another tenant says of it changes nothing
    answer(world, q, first.number)
    assert not introductions(world)
    answer(world, p, first.number)
    answer(world, e, first.number, seconds=9.0)
    answer(world, d, first.number, seconds=1e-6)
    answer(world, q, second.number)
    answer(world, e, second.number, seconds=2e-6)
    known = {pair: one.costs for pair, one in world.directory.probing.known.items()}
    seconds = {pair: costs.seconds_per_descriptor for pair, costs in known.items() if costs}
    assert seconds == {
        HostPair("a", "shared", "shared"): 1e-6,
        HostPair("b", "shared", "shared"): 2e-6,
    }
    for source, destination in ((p, d), (q, e)):
        world.begin(source, destination)
    asked = [made.costs for made in world.orders(act.MakePlan)]
    assert [costs.seconds_per_descriptor for costs in asked if costs] == [1e-6, 2e-6]
    for reader, peer in introductions(world):
        assert reader.engine.tenant == peer.engine.tenant


def test_a_measurement_hands_over_no_memory_that_the_plan_does_not_read() -> None:
    world = World(measures=True)
    p, d = pair_of(world, "a", host="host", ranks=2)
    world.plans_at_once = False
    world.begin(p, d)
    world.outcome = crossed(world)
    world.plan()
    assert not probes(world)
    expected = {(d.agents[dst].key, p.agents[1 - dst].key) for dst in range(2)}
    assert set(introductions(world)) == expected


def crossed(world: World) -> PairPlan:
    """Return a plan in which each destination rank reads from the other source rank alone."""
    return replace(pair_plan(2, 2, False, False), sources={0: (1,), 1: (0,)})


# -- quotas ---------------------------------------------------------------------------------------


def test_live_handoffs_of_a_tenant_are_bounded() -> None:
    world = World(limits=replace(LIMITS, tenant_max_live=2))
    (p, d), (q, e) = pair_of(world, "a"), pair_of(world, "b")
    world.publish(p, "one")
    world.request(d, "two")
    for word in (world.publish, world.request, world.decline):
        with pytest.raises(QuotaExceededError, match="tenant a has 2 handoffs") as caught:
            word(p, "three")
        assert caught.value.subject == {"tenant": "a", "what": "handoffs", "limit": "2"}
    world.request(d, "one")  # a side of one that is there
    hand_over(world, q, e, "one")
    world.cancel(p, "one")
    assert world.publish(p, "three") == []


def test_engines_of_a_tenant_are_bounded() -> None:
    world = World(limits=replace(LIMITS, tenant_max_engines=2))
    p, _ = pair_of(world, "a")
    with pytest.raises(QuotaExceededError, match="tenant a has 2 engines"):
        world.engine("third", tenant="a")
    world.engine("third", tenant="b")
    again = world.engine("p", tenant="a")  # a new life takes no more room
    assert p.record.gone
    world.unregister(again)
    world.engine("third", tenant="a")


def test_the_ends_of_one_tenant_do_not_displace_those_of_another() -> None:
    world = World(limits=replace(LIMITS, max_ended=4, tenant_max_ended=3))
    p, q = world.engine("p", tenant="a"), world.engine("q", tenant="b")
    world.decline(q, "kept")
    for index in range(10):
        world.decline(p, f"h{index}")
    assert [name for _, name in world.directory.ledger.ended] == ["kept", "h7", "h8", "h9"]
    world.decline(q, "more")
    assert [name for _, name in world.directory.ledger.ended] == ["h7", "h8", "h9", "more"]
    assert world.directory.ledger.tenants.of("a").ended_counts == {State.CANCELLED: 10}
