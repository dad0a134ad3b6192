"""What a tenant has the broker keep is counted in bytes, and refused before it is kept.

The world looks after every event whether the account says what a search finds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from core.world import LIMITS, Side, World, alone, packed, pair_plan
from restow.broker.core.common.keys import AgentKey, EngineKey
from restow.broker.core.common.pair import PAIR_BYTES, PairPlan
from restow.broker.core.engines.account import (
    ENGINE_BYTES,
    FENCE_BYTES,
    HANDOFF_BYTES,
)
from restow.broker.core.engines.agent import AGENT_BYTES, AgentRecord, RegionMemory
from restow.broker.errors import DirectoryFullError, QuotaExceededError, RequestError
from restow.broker.layout import Layout, Model
from restow.broker.planner import Program
from restow.broker.planner.program import FORMS, Step
from restow.v1 import broker_pb2 as pb

MIB = 1 << 20
MANY = list(range(1, 90))
LIST_BYTES = len(packed(MANY))


def bounded(more_bytes: int) -> tuple[World, Side, Side]:
    """Return P and D of a tenant that may have ``more_bytes`` kept beside what P and D take."""
    found = World()
    found.engine("p"), found.engine("d")
    taken = found.directory.ledger.tenants.account("t").kept_bytes
    world = World(limits=replace(LIMITS, tenant_max_bytes=taken + more_bytes))
    return world, world.engine("p"), world.engine("d")


def kept(world: World, tenant: str = "t") -> int:
    return world.directory.ledger.tenants.account(tenant).kept_bytes


def test_ids_are_counted_and_given_back_however_a_handoff_ends() -> None:
    world, p, d = bounded(MIB)
    world.request(d, "first")  # from then on there are tables of the blocks that D has in use
    world.cancel(d, "first")
    before = kept(world)
    world.publish(p, blocks={"kv": MANY}, final=False)
    assert kept(world) == before + HANDOFF_BYTES + LIST_BYTES
    world.publish(p, blocks={"kv": MANY}, final=False, repeated=True)
    assert kept(world) == before + HANDOFF_BYTES + LIST_BYTES
    world.cancel(p)
    world.request(d, "other", blocks={"kv": MANY})
    assert kept(world) == before + HANDOFF_BYTES + LIST_BYTES
    world.cancel(d, "other")
    world.decline(d, "third")
    assert kept(world) == before
    world.publish(p, "fourth")
    world.request(d, "fourth")
    world.fence_all(p, "fourth")
    world.settle(d, world.find("fourth").number)
    world.unregister(d)
    world.unregister(p)
    assert kept(world) == PAIR_BYTES


@pytest.mark.parametrize("by_d", [False, True])
def test_ids_that_are_too_many_are_refused_and_nothing_is_left_of_them(by_d: bool) -> None:
    world, p, d = bounded(HANDOFF_BYTES + LIST_BYTES - 1)
    before = kept(world)
    say: Callable[[], object] = (
        (lambda: world.request(d, blocks={"kv": MANY}))
        if by_d
        else (lambda: world.publish(p, blocks={"kv": MANY}, final=False))
    )
    with pytest.raises(QuotaExceededError, match="more exceed its quota") as caught:
        say()
    assert caught.value.subject["what"] == "bytes"
    assert kept(world) == before
    assert not world.directory.ledger.live
    world.publish(p, blocks={"kv": [1, 2, 3], "state": [4]})


def test_what_all_tenants_have_kept_is_bounded_as_well() -> None:
    found = World()
    found.engine("p")
    world, p = alone("p", limits=replace(LIMITS, max_bytes=kept(found) + HANDOFF_BYTES))
    world.publish(p, blocks={}, final=False)
    with pytest.raises(DirectoryFullError, match="its maximum of"):
        world.publish(p, "g", blocks={}, final=False)
    with pytest.raises(DirectoryFullError):
        world.engine("q", tenant="else")


def test_agents_are_counted_with_their_metadata() -> None:
    world, p, _ = bounded(MIB)
    before = kept(world)
    regions = tuple(
        RegionMemory(one.name, 1 << 20, 100, one.page_stride_bytes, 1, 0)
        for one in p.record.layout.ranks[0].regions
    )
    key = AgentKey(p.record.key, 0)

    def admit(name: str, size_bytes: int) -> AgentRecord:
        agent = AgentRecord(key, name, bytes(size_bytes), regions, 1 << 20)
        world.hear(world.directory.connections.admit(p.record, agent, world.now_s))
        world.connected.add(key)
        world.check()
        return agent

    large = admit("large", MIB // 2)
    assert before + MIB // 2 - AGENT_BYTES < kept(world) < before + MIB // 2 + AGENT_BYTES
    with pytest.raises(QuotaExceededError):
        admit("larger", 2 * MIB)
    assert p.record.agents[0] is large
    admit("other", MIB * 3 // 4)  # in its place
    admit("small", 4)
    assert kept(world) - before < AGENT_BYTES


def test_layouts_are_counted_once_and_gone_with_the_last_engine_that_has_them() -> None:
    world = World(limits=replace(LIMITS, tenant_max_bytes=2 * MIB))
    register = world.directory.members.register
    layout = Layout(Model("large", ()), ())

    def come(name: str, life: str, digest: str, size_bytes: int) -> None:
        key = EngineKey("t", name)
        actions = register(key, life, layout, digest, world.now_s, layout_bytes=size_bytes)
        world.sides[key] = Side(world.directory.members.engines[key])
        world.hear(actions)
        world.check()

    come("a", "1", "x", MIB)
    come("b", "1", "x", MIB)
    assert kept(world) == MIB + 2 * ENGINE_BYTES
    with pytest.raises(QuotaExceededError):
        come("c", "1", "y", MIB)
    with pytest.raises(QuotaExceededError):
        come("a", "2", "y", MIB)
    assert world.directory.members.engines[EngineKey("t", "a")].incarnation == "1"
    old = world.side("b")
    world.unregister(old)
    come("a", "2", "y", MIB * 3 // 2)  # its own life before makes room
    assert kept(world) == MIB * 3 // 2 + ENGINE_BYTES
    assert not old.record.layout.ranks
    assert old.record.layout is not layout


def test_fences_before_their_publication_are_counted_and_their_ids_bounded() -> None:
    world, p, d = bounded(2 * HANDOFF_BYTES)
    before = kept(world)
    with pytest.raises(RequestError):
        world.fence(p, name="x" * 257)
    fit = 2 * HANDOFF_BYTES // (FENCE_BYTES + 64)
    for number in range(fit - 1):
        world.fence(p, name=f"early {number}")
    with pytest.raises(QuotaExceededError):
        world.fence(p, name="x" * 250)
    assert fit - 2 < len(p.record.unpublished_fences) < fit + 2
    world.wait(60)
    assert kept(world) == before
    world.fence(p, name="h")
    world.publish(p, blocks={}, final=False)
    assert kept(world) == before + HANDOFF_BYTES
    world.fence(p, name="next")
    world.unregister(p)
    world.unregister(d)
    assert kept(world) == 0


def plan_of(size_bytes: int) -> PairPlan:
    rows = np.zeros((size_bytes // 8 // 13, 13), np.int64)
    plan = pair_plan(1, 1, False, False)
    form = next(iter(FORMS))
    return replace(plan, programs={0: Program("program/0", 0, (), (Step(form, rows),))})


def test_a_plan_takes_the_place_of_older_ones_and_fails_what_waits_if_there_is_none() -> None:
    world, p, d = bounded(MIB)
    world.outcome = plan_of(MIB * 3 // 4)
    world.ready(p)
    world.request(d)
    number = world.find("h").number
    first = set(world.directory.plans.known)
    # By this plan ranks read: another one, as large, has no room beside it.
    e = world.engine("e", ranks=2)
    world.begin(p, e, "other")
    assert [(one.state, one.reason) for one in e.told] == [("FAILED", "QUOTA_EXCEEDED")]
    assert set(world.directory.plans.known) == first
    world.settle(d, number)
    world.begin(p, e, "third")
    assert world.find("third").granted
    assert not first & set(world.directory.plans.known)


def test_tenants_share_no_plan() -> None:
    world = World()
    for tenant in ("a", "b"):
        p, d = world.engine("p", tenant=tenant), world.engine("d", tenant=tenant)
        world.publish(p)
        world.request(d)
    assert {key.tenant for key in world.directory.plans.known} == {"a", "b"}


def test_a_name_counts_as_much_once_it_was_encoded() -> None:
    # Encoding leaves bytes with the text. The broker gives back what it counted before that.
    world, p, _ = bounded(10 * HANDOFF_BYTES)
    before = world.directory.ledger.tenants.account("t").kept_bytes
    name = "名" * 100 + "ж"
    world.publish(p, name)
    pb.EngineRef(engine_id=name)
    world.cancel(p, name)
    assert world.directory.ledger.tenants.account("t").kept_bytes == before
