"""Engines that have come find plans made and costs measured: no handoff of theirs waits for it."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

import pytest

from agent_harness.handover import destination_memory
from agent_harness.processes import child
from agent_harness.source_main import serve_source
from agent_harness.waiting import WAIT_S, until
from agent_harness.world import make_case
from restow.agents.link.async_agent import AsyncAgent
from restow.agents.link.settings import AgentSettings
from restow.broker.client import EngineSession
from restow.broker.core.common.limits import Limits
from restow.broker.core.handoffs.timeline import COSTS, PLAN
from restow.broker.server.base import planning
from restow.broker.server.base.settings import BrokerSettings
from restow.broker.server.serve import running_broker


@pytest.mark.parametrize("large", [False, True], ids=["in a thread", "in a process"])
async def test_the_first_handoff_waits_for_nothing_that_was_found_out_before(
    monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    monkeypatch.setattr("restow.agents.execute.executor.PROBE_S", WAIT_S)
    if large:
        monkeypatch.setattr(planning, "LARGE_SHARDS", 3)
    case = make_case("wide")
    fields = {field.name: field for field in case.destination.model.fields}
    memory = destination_memory(case)
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        broker = await enter(running_broker(BrokerSettings(listen="127.0.0.1:0")))
        directory = broker.hub.directory
        directory.probing._limits = replace(Limits(), probe_s=WAIT_S)
        source = await enter(
            EngineSession("P", "life-1", case.source, broker.address, publishes=True)
        )
        destination = await enter(
            EngineSession("D", "life-1", case.destination, broker.address, asks=True)
        )
        process = await enter(child(serve_source, "wide", broker.address, 8 << 20))
        for rank, own in memory.items():
            agent = AsyncAgent(
                broker.address, "D", "life-1", rank, own.regions, AgentSettings(8 << 20)
            )
            await agent.start()
            stack.push_async_callback(agent.close)
        await until(lambda: bool(directory.probing.known) and not len(directory.ahead), 60.0)
        (known,) = directory.probing.known.values()
        assert known.costs is not None
        # Without the costs, and with them; nothing from D to P.
        assert len(directory.plans.known) == 2
        process.tell("h")
        released = source.publish("h", case.src_ids, case.tokens)
        ended = await asyncio.wait_for(destination.request("h", case.dst_ids), WAIT_S)
        assert ended.done, ended
        assert (await asyncio.wait_for(released, WAIT_S)).done
        for rank, own in memory.items():
            assert (own.data == own.expected(fields, case.tokens)).all(), f"rank {rank}"
        events = {event for _, event, _ in directory.ledger.find("default", "h").timeline}
        assert not events & {*PLAN, *COSTS}
        assert len(directory.plans.known) == 2
