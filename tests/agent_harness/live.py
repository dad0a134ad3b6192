"""P and D of a case under a real broker: what handoffs between them bring."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, Self

from agent_harness.processes import child
from agent_harness.source_main import serve_source
from agent_harness.waiting import WAIT_S
from agent_harness.world import RankMemory, make_case
from restow.agents.link.async_agent import AsyncAgent
from restow.agents.link.settings import AgentSettings
from restow.broker.client import EngineSession

SETTINGS = AgentSettings(staging_bytes=8 << 20, try_metadata=False)


class Live:
    """The engines of a case; sessions, P's ranks and D's ranks start in any order."""

    def __init__(
        self, name: str, address: str, memory: dict[int, RankMemory] | None = None
    ) -> None:
        self.name, self.address = name, address
        self.case = make_case(name)
        self.memory = memory or self.case.destination_memory()
        self.source: dict[int, RankMemory] = {}
        """P's memory, if its ranks are in this process."""
        self.agents: list[AsyncAgent] = []
        """D's."""
        self.fence: Callable[[str], object] = lambda _: None
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def start_engines(self, ahead: bool = False) -> None:
        """Register both engines; ``ahead``: have their handoffs planned before the first."""
        enter = self._stack.enter_async_context
        source, destination = self.case.source, self.case.destination
        life = "life-1"
        self.p = await enter(EngineSession("P", life, source, self.address, publishes=ahead))
        self.d = await enter(EngineSession("D", life, destination, self.address, asks=ahead))

    async def start_source(self, serve: Callable[..., None] = serve_source, *args: object) -> None:
        """Run P's ranks in a process of their own."""
        process = child(serve, self.name, self.address, *args)
        self.fence = (await self._stack.enter_async_context(process)).tell

    async def start_source_here(self) -> None:
        """Run P's ranks in this process."""
        self.source = self.case.source_memory()
        sources = [await self._started("P", *one, SETTINGS) for one in self.source.items()]

        def fence(handoff_id: str) -> None:
            for agent in sources:
                agent.fence(handoff_id)

        self.fence = fence

    async def start_agents(self, settings: AgentSettings = SETTINGS) -> None:
        """Run D's ranks, in place of those that run."""
        for agent in self.agents:
            await agent.close()
        self.agents = [await self._started("D", *one, settings) for one in self.memory.items()]

    def begin_agents(self, incarnation: str = "life-1") -> None:
        """Run D's ranks, and do not wait until the broker knows them."""
        for rank, memory in self.memory.items():
            agent = AsyncAgent(self.address, "D", incarnation, rank, memory.regions, SETTINGS)
            agent.begin()
            self.agents.append(agent)
            self._stack.push_async_callback(agent.close)

    async def hand_over(self, handoff_id: str) -> tuple[Any, Any]:
        """Run a handoff into poisoned memory; return how it ended for D, and for P."""
        for memory in self.memory.values():
            memory.poison()
        self.fence(handoff_id)
        released = self.p.publish(handoff_id, self.case.src_ids, self.case.tokens)
        request = self.d.request(handoff_id, self.case.dst_ids)
        return await asyncio.wait_for(asyncio.gather(request, released), WAIT_S)

    async def check_handoff(self, handoff_id: str) -> None:
        """Run a handoff, and check that every byte arrives and no other changes."""
        ended, released = await self.hand_over(handoff_id)
        assert ended.done, ended
        assert released.done, released
        self.check_whole()

    def check_whole(self) -> None:
        """Check that every byte of D is the state's or still poison."""
        for rank, memory in self.memory.items():
            expected = memory.expected(self.case.fields, self.case.tokens)
            assert (memory.data == expected).all(), f"rank {rank}"

    def check_staging_is_free(self) -> None:
        """Check that no agent of D keeps staging."""
        for agent in self.agents:
            assert not agent.figures.gather.used_bytes
            assert not agent.figures.scatter.used_bytes

    async def _started(
        self, engine_id: str, rank: int, memory: RankMemory, settings: AgentSettings
    ) -> AsyncAgent:
        agent = AsyncAgent(self.address, engine_id, "life-1", rank, memory.regions, settings)
        self._stack.push_async_callback(agent.close)
        await agent.start()
        return agent


@contextlib.asynccontextmanager
async def live(name: str, address: str) -> AsyncIterator[Live]:
    """Register both engines of a case, with P's ranks in a process."""
    async with Live(name, address) as both:
        await both.start_engines()
        await both.start_source()
        yield both
