"""Content digests under the real broker: what is asked of agents, what engines are told."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
from collections.abc import AsyncIterator
from typing import Any

import pytest

from agent_harness.handover import destination_memory
from agent_harness.waiting import WAIT_S
from agent_harness.world import RankMemory, make_case
from laws.strategies import SENDING
from restow.agents.execute.gathering import Gathering
from restow.agents.execute.orders import StagedRun
from restow.agents.link.async_agent import AsyncAgent
from restow.agents.link.settings import AgentSettings
from restow.broker.client import EngineSession
from restow.broker.client.admin import AdminClient
from restow.broker.core.common.pair import DigestMode
from restow.broker.planner import Strategy
from restow.broker.server.base.settings import BrokerSettings
from restow.broker.server.serve import running_broker

pytestmark = pytest.mark.sampled

SETTINGS = AgentSettings(8 << 20)


class Engines:
    """The engines of a case, their memory in this process."""

    def __init__(self, name: str, address: str) -> None:
        self.case, self.address = make_case(name), address
        self.fields = {field.name: field for field in self.case.source.model.fields}
        self.there = {
            one.rank: RankMemory(one, self.case.src_ids) for one in self.case.source.ranks
        }
        self.here = destination_memory(self.case)
        self.sources: list[AsyncAgent] = []
        for memory in self.there.values():
            memory.write(self.fields, self.case.tokens)

    async def hand_over(self, handoff_id: str) -> tuple[Any, Any]:
        """Run a handoff; return how it ended for D, and for P."""
        for memory in self.here.values():
            memory.poison()
        released = self.p.publish(handoff_id, self.case.src_ids, self.case.tokens)
        for agent in self.sources:
            agent.fence(handoff_id)
        asked = self.d.request(handoff_id, self.case.dst_ids)
        return await asyncio.wait_for(asyncio.gather(asked, released), WAIT_S)

    def all_arrived(self) -> bool:
        return all(
            (memory.data == memory.expected(self.fields, self.case.tokens)).all()
            for memory in self.here.values()
        )

    @contextlib.asynccontextmanager
    async def live(self) -> AsyncIterator[Engines]:
        async with contextlib.AsyncExitStack() as stack:
            enter = stack.enter_async_context
            case = self.case
            self.p = await enter(EngineSession("P", "life-1", case.source, self.address))
            self.d = await enter(EngineSession("D", "life-1", case.destination, self.address))
            for side, memories in (("P", self.there), ("D", self.here)):
                for rank, memory in memories.items():
                    agent = AsyncAgent(self.address, side, "life-1", rank, memory.regions, SETTINGS)
                    await agent.start()
                    stack.push_async_callback(agent.close)
                    if side == "P":
                        self.sources.append(agent)
            yield self


@contextlib.asynccontextmanager
async def engines(
    strategy: Strategy, digests: DigestMode, name: str = "wide", every: int = 64
) -> AsyncIterator[Engines]:
    settings = BrokerSettings(
        listen="127.0.0.1:0",
        strategy=strategy,
        digests=digests,
        digest_every=every,
        costs={"seconds_per_stage": 1e-4},
    )
    async with (
        running_broker(settings) as broker,
        Engines(name, broker.address).live() as both,
    ):
        yield both


async def told(address: str, handoff_id: str) -> tuple[dict[str, str], tuple[int, int]]:
    """Return a handoff's timeline, and how many handoffs were compared and how many differed."""

    def ask() -> tuple[dict[str, str], tuple[int, int]]:
        with AdminClient(address, WAIT_S) as client:
            status = client.status()
            timeline = client.handoff(handoff_id).timeline
        counts = status.handoffs_checked, status.digest_mismatches
        return {entry.event: entry.detail for entry in timeline}, counts

    return await asyncio.to_thread(ask)


@pytest.mark.parametrize("strategy", SENDING)
async def test_all_handoffs_are_checked(strategy: Strategy) -> None:
    async with engines(strategy, DigestMode.ALL) as both:
        for name in ("h1", "h2"):  # the second one finds programs known
            ended, released = await both.hand_over(name)
            assert ended.done, ended
            assert released.done
            assert both.all_arrived()
        timeline, counts = await told(both.address, "h2")
        assert timeline["checked"] == "D read what P hashed"
        assert counts == (2, 0)


@pytest.mark.parametrize("strategy", [one for one in SENDING if one is not Strategy.AUTO])
async def test_a_byte_of_ps_that_changes_after_it_was_hashed_costs_d_its_state(
    strategy: Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Gathering._digest
    spoiled: list[int] = []

    async def then_spoiled(self: Gathering, program: Any, staged: StagedRun, order: Any) -> bytes:
        made = await right(self, program, staged, order)
        if spoil and not spoiled:
            address = staged.address
            if not staged.length_bytes:
                (state,) = both.case.src_ids["state"]
                region = both.there[self._rank].regions[0]
                address = region.base_address + state * region.page_stride_bytes
            ctypes.c_ubyte.from_address(address).value ^= 1
            spoiled.append(address)
        return made

    monkeypatch.setattr(Gathering, "_digest", then_spoiled)
    spoil = False
    async with engines(strategy, DigestMode.ALL) as both:
        ended, _ = await both.hand_over("well")
        assert ended.done
        spoil = True
        ended, released = await both.hand_over("spoiled")
        assert (ended.state, ended.reason) == ("FAILED", "DIGEST_MISMATCH")
        assert not released.done
        timeline, counts = await told(both.address, "spoiled")
        assert "digest_mismatch" in timeline
        assert "checked" not in timeline
        assert counts == (2, 1)
        ctypes.c_ubyte.from_address(spoiled[0]).value ^= 1
        ended, _ = await both.hand_over("well again")
        assert ended.done
        assert both.all_arrived()


async def test_some_are_checked_and_the_others_cost_nothing() -> None:
    async with engines(Strategy.SLICES, DigestMode.SAMPLED, every=3) as both:
        checked = 0
        for index in range(24):
            ended, _ = await both.hand_over(f"h{index}")
            assert ended.done
            timeline, counts = await told(both.address, f"h{index}")
            assert ("checked" in timeline) == ("staged" in timeline)
            checked += "checked" in timeline
        assert counts == (checked, 0)
        assert 0 < checked < 24


async def test_where_it_is_off_nobody_is_asked() -> None:
    async with engines(Strategy.SLICES, DigestMode.OFF) as both:
        ended, _ = await both.hand_over("h")
        assert ended.done
        timeline, counts = await told(both.address, "h")
        assert not {"staged", "checked"} & set(timeline)
        assert counts == (0, 0)
