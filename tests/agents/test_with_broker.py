"""Agents under the real broker: a publication, a request, and the state is there."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from agent_harness.live import SETTINGS, Live, live
from agent_harness.waiting import WAIT_S, until
from agent_harness.world import POISON
from broker.fakes import broker
from laws.strategies import SENDING
from restow.agents.execute import executor
from restow.agents.reading.host_memory import host_name
from restow.broker.client import BrokerCallError, EngineSession
from restow.broker.core.common.limits import Limits
from restow.broker.core.handoffs.timeline import WAITS
from restow.broker.planner import CostModel, Strategy
from restow.broker.server.base import planning

EACH = [one for one in SENDING if one is not Strategy.AUTO]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        *((name, one) for name in ("wide", "stages", "shared") for one in EACH),
        ("cast", Strategy.AUTO),
        ("cast", Strategy.INTERLEAVE),
        ("drafts", Strategy.SLICES),
        ("drafts", Strategy.WHOLE),
    ],
)
async def test_a_request_ends_with_every_byte_in_place(name: str, strategy: Strategy) -> None:
    async with (
        broker(strategy=strategy, allow_narrowing=name == "cast") as running,
        live(name, running.address) as both,
    ):
        for host_reads in (True, False):
            await both.start_agents(replace(SETTINGS, host_reads=host_reads))
            for number in range(2):  # the second one finds programs and peers known
                await both.check_handoff(f"{host_reads} {number}")
            reads = [agent.figures.reads["process_vm_readv"].reads for agent in both.agents]
            if strategy is Strategy.SLICES or not host_reads:  # others may read single pieces
                assert any(reads) == host_reads


async def test_agents_write_when_their_own_engine_has_written() -> None:
    async with broker() as running, live("wide", running.address) as both:
        await both.start_agents()
        both.fence("h")
        both.p.publish("h", both.case.src_ids, both.case.tokens)
        request = both.d.request("h", both.case.dst_ids, write_mark=7)
        await until(lambda: all(agent._writes._waiting for agent in both.agents))
        assert all((own.data == POISON).all() for own in both.memory.values())
        for agent in both.agents:
            agent.writes_done(7)
        assert (await asyncio.wait_for(request, WAIT_S)).done
        both.check_whole()
        with pytest.raises(BrokerCallError, match="write_mark -1 must not be negative"):
            await both.d.request("g", both.case.dst_ids, write_mark=-1)


async def test_agents_may_begin_before_their_engine_is_known() -> None:
    async with broker() as running, Live("wide", running.address) as both:
        both.begin_agents()
        await until(lambda: running.hub.expected.waiting == len(both.agents))
        await both.start_engines()
        await both.start_source()
        await both.check_handoff("h")
        assert all(agent.refusal is None for agent in both.agents)


async def test_agents_of_a_new_life_may_come_before_its_engine() -> None:
    async with broker() as running, Live("wide", running.address) as both:
        layout = both.case.destination
        async with EngineSession("D", "life-1", layout, running.address):
            both.begin_agents("life-2")
            await until(lambda: running.hub.expected.waiting == len(both.agents))
            async with EngineSession("D", "life-2", layout, running.address):
                await until(lambda: not running.hub.expected.waiting)
                (engine,) = running.hub.directory.members.engines.values()
                assert engine.incarnation == "life-2"
                assert engine.complete


@pytest.mark.parametrize("ahead", ["", "in a thread", "in a process"])
async def test_no_handoff_waits_for_costs(ahead: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that engines with a known role find plans and costs; others are measured later."""
    # However busy the machine: in service what takes longer is not waited for.
    monkeypatch.setattr(executor, "PROBE_S", WAIT_S)
    if ahead == "in a process":
        monkeypatch.setattr(planning, "LARGE_SHARDS", 3)
    async with broker() as running, Live("wide", running.address) as both:
        directory = running.hub.directory
        directory.probing._limits = replace(Limits(), probe_s=WAIT_S)
        await both.start_engines(ahead=bool(ahead))
        await both.start_source()
        await both.start_agents()
        if ahead:
            await until(lambda: bool(directory.probing.known) and not len(directory.ahead), 60.0)
            # Without the costs, and with them; nothing from D to P.
            assert len(directory.plans.known) == 2
        await both.check_handoff("h")
        await until(lambda: bool(directory.probing.known) and not len(directory.ahead), 60.0)
        ((hosts, known),) = directory.probing.known.items()
        assert hosts.source_host == hosts.destination_host == host_name()
        assert known.failure == ""
        assert known.costs is not None
        assert known.costs != CostModel()
        assert known.costs.seconds_per_launch > 0
        both.check_staging_is_free()
        if ahead:
            events = {event for _, event, _ in directory.ledger.find("default", "h").timeline}
            assert WAITS not in events
            assert len(directory.plans.known) == 2
        plans = set(directory.plans.known)
        await both.check_handoff("h2")
        assert set(directory.plans.known) == plans
