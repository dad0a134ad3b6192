"""P and D of a case with their agents; the broker's lines are the test's."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest

from agent_harness.fake_broker import FakeBroker
from agent_harness.handover import hand_over, send_execute, stage
from agent_harness.processes import Child, child
from agent_harness.source_main import serve_source
from agent_harness.world import POISON, RankMemory, blocks, make_case
from restow.agents.binding.extents import Extents, one_extent, source_extents
from restow.agents.binding.pages import TokenRange
from restow.agents.link.async_agent import AsyncAgent
from restow.agents.link.settings import AgentSettings
from restow.agents.memory.regions import region_table
from restow.broker.planner import Program
from restow.broker.rpc import wire_program
from restow.v1 import agent_link_pb2 as pb

STAGING_BYTES = 8 << 20
SETTINGS = AgentSettings(staging_bytes=STAGING_BYTES, quarantine_s=0.4, try_metadata=False)
"""Without the process that tries metadata, which takes a second of each agent's start."""


class Pair:
    """The memory of both, and what became of it."""

    def __init__(
        self, name: str, fake: FakeBroker, stack: contextlib.AsyncExitStack, settings: AgentSettings
    ) -> None:
        self.case, self.fake = make_case(name), fake
        self.agents: dict[tuple[str, int], AsyncAgent] = {}
        self.source: dict[int, RankMemory] = {}
        """P's memory, if its ranks are in this process."""
        self.memory = self.case.destination_memory()
        self._stack, self._settings = stack, settings

    async def start(self, side: str, rank: int, memory: RankMemory) -> None:
        """Start a rank's agent."""
        agent = AsyncAgent(self.fake.address, side, "life-1", rank, memory.regions, self._settings)
        self._stack.push_async_callback(agent.close)
        await agent.start()
        self.agents[side, rank] = agent

    def read_from(self, program: Program, src_rank: int, staged: pb.Staged) -> Extents:
        """Return where P has what is read from a rank."""
        message = wire_program.program_to_proto(program, src_rank, hashed=True)
        return source_extents(
            wire_program.program_from_proto(message),
            src_rank,
            region_table(self.source[src_rank].regions),
            blocks(self.case.src_ids),
            TokenRange(0, self.case.tokens),
            one_extent(staged.address, staged.bytes),
        )

    def check_whole(self, rank: int) -> None:
        """Check that every byte is the state's or still poison."""
        memory = self.memory[rank]
        wrong = np.flatnonzero(memory.data != memory.expected(self.case.fields, self.case.tokens))
        assert not len(wrong), f"{len(wrong)} wrong bytes, the first at {wrong[0]}"

    def check_cleared(self, rank: int) -> None:
        """Check that snapshots are zero, and that padding and guards are untouched."""
        memory, mask = self.memory[rank], self._snapshots(rank)
        assert mask.any()
        assert not memory.data[mask].any(), "a failed handoff left a snapshot behind"
        untouched = memory.expected(self.case.fields, self.case.tokens) == POISON
        assert (memory.data[untouched & ~mask] == POISON).all()

    def check_untouched(self, rank: int) -> None:
        """Check that nothing but the cleared snapshots has changed."""
        memory, mask = self.memory[rank], self._snapshots(rank)
        found = memory.data.copy()
        memory.poison()
        assert (found == memory.data)[~mask].all()

    def _snapshots(self, rank: int) -> Any:
        return self.memory[rank].cleared(self.case.fields, self.case.tokens)

    async def stage(
        self, program: Program, number: int, hashed: bool = False
    ) -> dict[int, pb.Staged]:
        """Have P gather for the program's rank; if ``hashed``, hash too."""
        return await stage(self.fake, self.case, program, number, hashed=hashed)

    async def execute(
        self, program: Program, number: int, staged: dict[int, pb.Staged], hashed: bool = True
    ) -> pb.Settled:
        """Have D read into poisoned memory, and compare digests if ``hashed``."""
        self.memory[program.dst_rank].poison()
        stream = await send_execute(
            self.fake, self.case, program, number, staged=staged, hashed=hashed
        )
        settled: pb.Settled = await stream.next()
        return settled

    async def hand_over(
        self, program: Program, number: int, grant_ms: int = 10_000, hashed: bool = False
    ) -> pb.Settled:
        """Have P gather and D read into poisoned memory."""
        self.memory[program.dst_rank].poison()
        return await hand_over(self.fake, self.case, program, number, grant_ms, hashed)

    async def check_handoff(self, program: Program, number: int, hashed: bool = False) -> None:
        """Run a handoff, and check that every byte arrives and no other changes."""
        settled = await self.hand_over(program, number, hashed=hashed)
        assert (settled.handoff, settled.reason) == (number, ""), settled.detail
        assert settled.bytes > 0
        assert settled.compared == hashed
        self.check_whole(program.dst_rank)


@contextlib.asynccontextmanager
async def pair(
    name: str, ranks: Sequence[int] = (), settings: AgentSettings = SETTINGS
) -> AsyncIterator[Pair]:
    """Run all ranks of P, and the given ranks of D (none given: all), in this process."""
    async with FakeBroker() as fake, contextlib.AsyncExitStack() as stack:
        made = Pair(name, fake, stack, settings)
        made.source = made.case.source_memory()
        for rank, memory in made.source.items():
            await made.start("P", rank, memory)
        for rank in ranks or made.memory:
            await made.start("D", rank, made.memory[rank])
        yield made


@contextlib.asynccontextmanager
async def apart(name: str, rank: int = 0, tls: str = "all") -> AsyncIterator[tuple[Pair, Child]]:
    """Run P's ranks in a process, and a rank of D here; UCX has the transports ``tls``."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("UCX_TLS", tls)
        async with (
            FakeBroker() as fake,
            child(serve_source, name, fake.address, tls=tls) as process,
            contextlib.AsyncExitStack() as stack,
        ):
            made = Pair(name, fake, stack, SETTINGS)
            await made.start("D", rank, made.memory[rank])
            yield made, process
