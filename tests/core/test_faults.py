"""What breaks between publication and the end: ranks, agents, engines, and either side's mind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from core.world import World, alone, ends, kinds, p_and_d, p_d_and_e, reading
from restow.broker.core.audit import audit
from restow.broker.core.common import actions as act
from restow.broker.core.common.keys import AgentKey, EngineKey
from restow.broker.core.common.limits import Limits
from restow.broker.core.engines.agent import AgentRecord, RegionMemory
from restow.broker.core.engines.engine import EngineRecord
from restow.broker.errors import (
    AgentMismatchError,
    AgentUnknownError,
    DirectoryFullError,
    EngineReplacedError,
    EngineUnknownError,
    RequestError,
)

# -- ranks ----------------------------------------------------------------------------------------


def test_a_failed_rank_frees_p_at_once_and_d_when_the_others_write_no_more() -> None:
    world, p, d, number = reading(1, 3)
    world.settle(d, number, 1, "TRANSFER_FAILED")
    assert ends(p) == [("FAILED", "TRANSFER_FAILED")]
    assert world.settle(d, number, 2) == []
    assert d.told == []
    world.settle(d, number, 0, "SECOND_FAULT")
    assert ends(p) == ends(d) == [("FAILED", "TRANSFER_FAILED")]
    assert d.told[0].detail == "rank 1 of engine d: words"


def test_words_of_ranks_that_nobody_waits_for_change_nothing() -> None:
    world, p, d, number = reading(1, 2)
    assert world.settle(p, number) == []
    for rank in (0, 1):
        assert world.settle(d, number + 1, rank) == []
    assert world.find().bytes_read == 0
    assert world.settle(d, number, 0) == []
    assert world.settle(d, number, 0, "TRANSFER_FAILED") == []
    assert world.find().bytes_read == 7
    world.settle(d, number, 1)
    assert ends(d) == [("DONE", "")]


def test_absurd_byte_counts_stay_inside_an_int64() -> None:
    world, _, d, number = reading(1, 2)
    world.settle(d, number, 0, size_bytes=2**63 - 1)
    world.settle(d, number, 1, size_bytes=-5)
    assert 0 < d.told[0].bytes < 2**63


# -- agents ---------------------------------------------------------------------------------------


def test_an_agent_of_p_that_stays_away_after_its_fence_fails_the_handoff() -> None:
    world, p = alone("p", 2)
    world.publish(p)
    world.fence(p, 0)
    world.disconnect(p, 1)
    world.wait(world.directory.limits.agent_wait_s - 0.1)
    assert ends(p) == []
    world.wait(1.2)
    assert ends(p) == [("FAILED", "AGENT_LOST")]


def test_an_agent_of_d_replaced_before_the_grant_costs_d_its_demand_and_p_nothing() -> None:
    world, p, d, other = p_d_and_e()
    world.publish(p)
    world.request(d)
    world.disconnect(d, 0)
    world.fence(p)
    world.connect(d, 0)
    assert ends(d) == [("FAILED", "AGENT_LOST")]
    world.request(other)
    world.settle(other, world.find().number)
    assert ends(p) == ends(other) == [("DONE", "")]


def test_an_agent_of_p_that_another_takes_the_place_of_fails_what_is_read() -> None:
    world, p, d, number = reading(1, 2)
    world.disconnect(p, 0)
    world.connect(p, 0)
    forgotten = [one.agent.rank for one in world.orders(act.SendForget)]
    assert forgotten == [0, 1]
    assert ends(p) == [("FAILED", "AGENT_LOST")]
    assert d.told == []
    world.settle(d, number, 0, "TRANSFER_FAILED")
    world.settle(d, number, 1)
    assert ends(p) == ends(d) == [("FAILED", "AGENT_LOST")]


def test_a_reader_that_is_lost_may_still_be_writing_until_it_is_back() -> None:
    world, p, d, number = reading(1, 2)
    world.disconnect(d, 1)
    world.settle(d, number, 0)
    assert p.told == []
    world.wait(world.directory.limits.agent_back_s + 0.1)
    assert ends(p) == [("FAILED", "AGENT_LOST")]
    assert ends(d) == []
    world.connect(d, 1)
    assert ends(p) == ends(d) == [("FAILED", "AGENT_LOST")]
    assert world.settle(d, number, 1) == []


def test_a_replaced_agent_says_nothing_more() -> None:
    world, p, d, number = reading()
    old = d.agents[0]
    world.connect(d, 0)
    d.agents[0], new = old, d.agents[0]
    assert world.settle(d, number) == []
    assert world.stage(d, number) == []
    assert world.fence(d, 0, "other") == []
    assert kinds(world.orders(act.CloseAgent)) == ["CloseAgent"]
    d.agents[0] = new
    world.settle(d, number)
    assert ends(p) == ends(d) == [("FAILED", "AGENT_LOST")]


def test_a_returned_agent_is_introduced_anew() -> None:
    world, p, d, number = reading()
    world.settle(d, number)
    world.disconnect(p, 0)
    world.connect(p, 0)
    world.ready(p, "next")
    assert kinds(world.request(d, "next")) == ["SendPeer", "SendExecute"]


def agent(
    engine: EngineRecord, name: str, regions: Sequence[RegionMemory], rank: int = 0
) -> AgentRecord:
    return AgentRecord(AgentKey(engine.key, rank), name, b"", tuple(regions), 0)


def test_a_refused_hello_does_not_cost_the_rank_its_agent() -> None:
    world, p = alone("p")
    connections, record = world.directory.connections, p.record
    good = [RegionMemory("kv", 1, 1, 4096, 1, 0), RegionMemory("state", 1, 1, 8192, 1, 0)]
    wrong = {
        "empty, too long": ("", 0, good),
        "region 1 is 'state' in the layout, but the agent announces none": ("x", 0, good[:1]),
        "region 2 is none in the layout, but the agent announces 'kv'": ("x", 0, [*good, good[0]]),
        "region 0 is 'kv' in the layout, but the agent announces 'state'": ("x", 0, good[::-1]),
        "region state: the agent's page stride is 16384 bytes, but the layout's is 8192": (
            "x",
            0,
            [good[0], replace(good[1], page_stride_bytes=16384)],
        ),
        "must be positive": ("x", 0, [replace(good[0], base_address=0), good[1]]),
        "below 2": ("x", 0, [replace(good[0], base_address=2**62, page_count=2**52), good[1]]),
        "must not be negative": ("x", 0, [replace(good[0], device_id=-1), good[1]]),
    }
    for words, (name, rank, regions) in wrong.items():
        with pytest.raises(AgentMismatchError, match=words):
            connections.admit(record, agent(record, name, regions, rank), world.now_s)
    with pytest.raises(AgentUnknownError, match="no rank 7"):
        connections.admit(record, agent(record, "x", good, 7), world.now_s)
    d = world.engine("d")
    with pytest.raises(AgentMismatchError, match="in use"):
        connections.admit(d.record, agent(d.record, p.agents[0].agent_name, good), world.now_s)
    assert record.agents == p.agents


# -- engines --------------------------------------------------------------------------------------


def test_an_engine_that_is_not_there() -> None:
    world = World()
    members = world.directory.members
    with pytest.raises(EngineUnknownError, match="call RegisterEngine first"):
        members.engine(EngineKey("t", "p"), "1")
    old = world.engine("p").record
    with pytest.raises(EngineUnknownError, match="this is other: call RegisterEngine first"):
        members.engine(old.key, "other")
    for _ in range(2):
        world.engine("p")
        with pytest.raises(EngineReplacedError, match=f"this is {old.incarnation}"):
            members.engine(old.key, old.incarnation)
        with pytest.raises(EngineReplacedError, match="use a new incarnation for every start"):
            members.register(old.key, old.incarnation, old.layout, old.layout_digest, 0.0)


def test_registering_again_changes_nothing_and_another_layout_needs_another_life() -> None:
    world, p = alone("p")
    members, record = world.directory.members, p.record
    life = (record.incarnation, record.layout)
    assert members.register(record.key, *life, record.layout_digest, 0.0) == []
    with pytest.raises(RequestError, match="another layout"):
        members.register(record.key, *life, "other", 0.0)
    assert members.engines[record.key] is record
    for engine_id, incarnation in (("", "1"), ("p", ""), ("p" * 257, "1"), ("p", "1" * 257)):
        with pytest.raises(RequestError, match="1 to 256 printable characters"):
            members.register(EngineKey("t", engine_id), incarnation, record.layout, "x", 0.0)


def test_engines_are_bounded() -> None:
    world = World(limits=Limits(max_engines=2))
    world.engine("a")
    world.engine("b")
    with pytest.raises(DirectoryFullError):
        world.engine("c")
    world.engine("b")


@pytest.mark.parametrize("how", ["replaced", "unregistered"])
def test_an_engine_that_goes_takes_its_waiting_handoffs_with_it(how: str) -> None:
    world, p, d = p_and_d()
    world.publish(p)
    world.request(d, "asked")
    world.request(d)
    if how == "replaced":
        world.engine("p")
    else:
        world.unregister(p)
    assert ends(p) == ends(d) == [("FAILED", "ENGINE_LOST")]
    assert kinds(world.sent)[-2:] == ["CloseAgent", "CloseSession"]
    world.unregister(d)
    assert ends(d)[1] == ("CANCELLED", "ENGINE_LOST")
    assert not world.directory.ledger.live


def test_the_last_words_of_an_engine_that_is_gone_are_refused() -> None:
    world, p = alone("p")
    world.publish(p)
    world.engine("p")
    for words in (world.publish, world.request, world.renew, world.cancel):
        with pytest.raises(EngineReplacedError):
            words(p)
    assert world.fence(p) == []
    assert not world.directory.ledger.live


def test_an_engine_that_goes_while_it_is_read_leaves_d_to_its_readers() -> None:
    world, p, d, number = reading(1, 2)
    world.unregister(p)
    assert d.told == []
    world.settle(d, number, 0)
    world.settle(d, number, 1)
    assert ends(d) == [("FAILED", "ENGINE_LOST")]


def test_a_reader_engine_that_goes_frees_p_at_once() -> None:
    world, p, _, _ = reading(1, 2)
    world.engine("d", 2)
    assert ends(p) == [("CANCELLED", "ENGINE_LOST")]


# -- either side's mind ---------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["p", "d"])
def test_cancelled_before_the_grant_ends_at_once(who: str) -> None:
    world, p, d = p_and_d()
    world.publish(p)
    world.request(d)
    world.cancel(world.side(who))
    assert ends(p) == ends(d) == [("CANCELLED", "CANCELLED")]
    assert f"engine {who} cancelled" in p.told[0].detail


@pytest.mark.parametrize("who", ["p", "d"])
def test_cancelled_while_reading_frees_p_at_once_and_d_when_all_have_settled(who: str) -> None:
    world, p, d, number = reading(1, 2)
    world.cancel(world.side(who))
    assert ends(p) == [("CANCELLED", "CANCELLED")]
    assert world.settle(d, number, 0) == []
    assert world.cancel(d) == []
    world.settle(d, number, 1)
    assert ends(p) == ends(d) == [("CANCELLED", "CANCELLED")]
    assert kinds(world.cancel(p)) == ["TellEnded"]


# -- the audit ------------------------------------------------------------------------------------


def test_the_audit_recounts_what_is_said_to_be_complete() -> None:
    world, p = alone("p", 2)
    world.publish(p)
    world.fence(p)
    world.find().side.complete = True
    assert any("fenced on all ranks: False" in words for words in audit(world.directory))
    world.find().side.complete = p.record.complete = False
    assert any("engine p is complete: False" in words for words in audit(world.directory))
