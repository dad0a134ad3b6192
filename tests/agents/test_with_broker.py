"""Agents under the real broker: a publication, a request, and the state is there."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

import pytest

from agent_harness.handover import destination_memory
from agent_harness.processes import child
from agent_harness.source_main import serve_source
from agent_harness.waiting import WAIT_S, until
from agent_harness.world import POISON, make_case
from laws.strategies import SENDING
from restow.agents.link.async_agent import AsyncAgent
from restow.agents.link.settings import AgentSettings
from restow.agents.reading.host_memory import host_name
from restow.broker.client import BrokerCallError, EngineSession
from restow.broker.core.common.limits import Limits
from restow.broker.planner import CostModel, Strategy
from restow.broker.server.base.settings import BrokerSettings
from restow.broker.server.serve import running_broker

pytestmark = pytest.mark.sampled


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        *(("wide", one) for one in SENDING if one is not Strategy.AUTO),
        ("cast", Strategy.AUTO),
        ("cast", Strategy.INTERLEAVE),
        *(
            (name, one)
            for name in ("stages", "shared")
            for one in SENDING
            if one is not Strategy.AUTO
        ),
        ("drafts", Strategy.SLICES),
        ("drafts", Strategy.WHOLE),
    ],
)
@pytest.mark.parametrize("host_reads", [True, False], ids=["by itself", "by NIXL"])
async def test_a_request_ends_with_every_byte_in_place(
    host_reads: bool, name: str, strategy: Strategy
) -> None:
    case = make_case(name)
    fields = {field.name: field for field in case.destination.model.fields}
    memory = destination_memory(case)
    settings = BrokerSettings(
        listen="127.0.0.1:0", strategy=strategy, allow_narrowing=name == "cast"
    )
    async with contextlib.AsyncExitStack() as stack:
        broker = await stack.enter_async_context(running_broker(settings))
        source = await stack.enter_async_context(
            EngineSession("P", "life-1", case.source, broker.address)
        )
        destination = await stack.enter_async_context(
            EngineSession("D", "life-1", case.destination, broker.address)
        )
        process = await stack.enter_async_context(child(serve_source, name, broker.address))
        agents = []
        for rank, own in memory.items():
            agent = AsyncAgent(
                broker.address,
                "D",
                "life-1",
                rank,
                own.regions,
                AgentSettings(8 << 20, host_reads=host_reads),
            )
            agents.append(agent)
            await agent.start()
            stack.push_async_callback(agent.close)
        for handoff_id in ("h1", "h2"):  # the second one finds programs and peers known
            for own in memory.values():
                own.data[:] = POISON
            process.tell(handoff_id)
            released = source.publish(handoff_id, case.src_ids, case.tokens)
            request = destination.request(handoff_id, case.dst_ids)
            ended = await asyncio.wait_for(request, WAIT_S)
            assert ended.done, ended
            assert (await asyncio.wait_for(released, WAIT_S)).done
            for rank, own in memory.items():
                assert (own.data == own.expected(fields, case.tokens)).all(), f"rank {rank}"
        reads = [agent.figures.reads["process_vm_readv"].reads for agent in agents]
        if strategy is Strategy.SLICES or not host_reads:  # others may read single pieces
            assert any(reads) == host_reads


async def test_agents_write_when_their_own_engine_has_written() -> None:
    case = make_case("wide")
    memory = destination_memory(case)
    fields = {field.name: field for field in case.destination.model.fields}
    async with contextlib.AsyncExitStack() as stack:
        broker = await stack.enter_async_context(
            running_broker(BrokerSettings(listen="127.0.0.1:0"))
        )
        source, destination = [
            await stack.enter_async_context(EngineSession(name, "life-1", shape, broker.address))
            for name, shape in (("P", case.source), ("D", case.destination))
        ]
        process = await stack.enter_async_context(child(serve_source, "wide", broker.address))
        agents = []
        for rank, own in memory.items():
            agent = AsyncAgent(broker.address, "D", "life-1", rank, own.regions)
            agents.append(agent)
            await agent.start()
            stack.push_async_callback(agent.close)
        process.tell("h")
        source.publish("h", case.src_ids, case.tokens)
        request = destination.request("h", case.dst_ids, write_mark=7)
        await until(lambda: all(agent._writes._waiting for agent in agents))
        assert all((own.data == POISON).all() for own in memory.values())
        for agent in agents:
            agent.writes_done(7)
        assert (await asyncio.wait_for(request, WAIT_S)).done
        for rank, own in memory.items():
            assert (own.data == own.expected(fields, case.tokens)).all(), f"rank {rank}"
        with pytest.raises(BrokerCallError, match="write_mark -1 must not be negative"):
            await destination.request("g", case.dst_ids, write_mark=-1)


async def test_agents_may_begin_before_their_engine_is_known() -> None:
    case = make_case("wide")
    memory = destination_memory(case)
    async with contextlib.AsyncExitStack() as stack:
        broker = await stack.enter_async_context(
            running_broker(BrokerSettings(listen="127.0.0.1:0"))
        )
        agents = []
        for rank, own in memory.items():
            agent = AsyncAgent(broker.address, "D", "life-1", rank, own.regions)
            agent.begin()
            agents.append(agent)
            stack.push_async_callback(agent.close)
        await until(lambda: broker.hub.expected.waiting == len(agents))
        source = await stack.enter_async_context(
            EngineSession("P", "life-1", case.source, broker.address)
        )
        destination = await stack.enter_async_context(
            EngineSession("D", "life-1", case.destination, broker.address)
        )
        process = await stack.enter_async_context(child(serve_source, "wide", broker.address))
        process.tell("h")
        released = source.publish("h", case.src_ids, case.tokens)
        ended = await asyncio.wait_for(destination.request("h", case.dst_ids), WAIT_S)
        assert ended.done, ended.detail
        assert (await released).done
        assert all(agent.refusal is None for agent in agents)


async def test_agents_of_a_new_life_may_come_before_its_engine() -> None:
    case = make_case("wide")
    memory = destination_memory(case)
    async with contextlib.AsyncExitStack() as stack:
        broker = await stack.enter_async_context(
            running_broker(BrokerSettings(listen="127.0.0.1:0"))
        )
        await stack.enter_async_context(
            EngineSession("D", "life-1", case.destination, broker.address)
        )
        agents = []
        for rank, own in memory.items():
            agent = AsyncAgent(
                broker.address, "D", "life-2", rank, own.regions, AgentSettings(1 << 20)
            )
            agent.begin()
            stack.push_async_callback(agent.close)
            agents.append(agent)
        await until(lambda: broker.hub.expected.waiting == len(agents))
        await stack.enter_async_context(
            EngineSession("D", "life-2", case.destination, broker.address)
        )
        await until(lambda: not broker.hub.expected.waiting)
        (engine,) = broker.hub.directory.members.engines.values()
        assert engine.incarnation == "life-2"
        assert engine.complete


async def test_costs_are_measured_before_they_are_first_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("restow.agents.execute.executor.PROBE_S", WAIT_S)
    case = make_case("wide")
    fields = {field.name: field for field in case.destination.model.fields}
    memory = destination_memory(case)
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        broker = await enter(running_broker(BrokerSettings(listen="127.0.0.1:0")))
        # However busy the machine: in service what takes longer is not waited for.
        broker.hub.directory.probing._limits = replace(Limits(), probe_s=WAIT_S)
        source = await enter(EngineSession("P", "life-1", case.source, broker.address))
        destination = await enter(EngineSession("D", "life-1", case.destination, broker.address))
        process = await enter(child(serve_source, "wide", broker.address, 8 << 20))
        agents = []
        for rank, own in memory.items():
            agent = AsyncAgent(
                broker.address, "D", "life-1", rank, own.regions, AgentSettings(8 << 20)
            )
            await agent.start()
            stack.push_async_callback(agent.close)
            agents.append(agent)
        process.tell("h")
        released = source.publish("h", case.src_ids, case.tokens)
        ended = await asyncio.wait_for(destination.request("h", case.dst_ids), WAIT_S)
        assert ended.done, ended
        assert (await asyncio.wait_for(released, WAIT_S)).done
        for rank, own in memory.items():
            assert (own.data == own.expected(fields, case.tokens)).all(), f"rank {rank}"
        ((hosts, known),) = broker.hub.directory.probing.known.items()
        assert hosts.source_host == hosts.destination_host == host_name()
        assert known.failure == ""
        assert known.costs is not None
        assert known.costs != CostModel()
        assert known.costs.seconds_per_launch > 0
        for agent in agents:
            assert not agent.figures.gather.used_bytes
            assert not agent.figures.scatter.used_bytes
