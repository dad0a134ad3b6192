"""P and D of a case with all their agents in this process; the broker's lines are the test's."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from agent_harness.fake_broker import FakeBroker
from agent_harness.handover import destination_memory, send_execute
from agent_harness.world import Case, RankMemory, blocks, make_case
from restow.agents.binding.extents import Extents, one_extent, source_extents
from restow.agents.binding.pages import TokenRange
from restow.agents.link.async_agent import AsyncAgent
from restow.agents.link.settings import AgentSettings
from restow.agents.memory.regions import region_table
from restow.broker.layout import Field
from restow.broker.planner import Program
from restow.broker.rpc import wire_program
from restow.v1 import agent_link_pb2 as pb

STAGING_BYTES = 8 << 20


class Pair:
    """The memory of both, and what became of it."""

    def __init__(self, case: Case, fake: FakeBroker) -> None:
        self.case, self.fake = case, fake
        self.agents: dict[tuple[str, int], AsyncAgent] = {}
        self.source = {one.rank: RankMemory(one, case.src_ids) for one in case.source.ranks}
        self.memory = destination_memory(case)
        for memory in self.source.values():
            memory.write(self.fields, case.tokens)

    @property
    def fields(self) -> dict[str, Field]:
        model = self.case.source.model
        return {field.name: field for field in (*model.fields, *model.inputs)}

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
        fields = {field.name: field for field in self.case.destination.model.fields}
        fields |= {field.name: field for field in self.case.destination.model.inputs}
        assert (memory.data == memory.expected(fields, self.case.tokens)).all()

    def check_cleared(self, rank: int) -> None:
        """Check that nothing is left of snapshots."""
        memory = self.memory[rank]
        fields = {field.name: field for field in self.case.destination.model.fields}
        mask = memory.cleared(fields, self.case.tokens)
        assert mask.any()
        assert not memory.data[mask].any()

    def check_untouched(self, rank: int) -> None:
        """Check that nothing but the cleared snapshots has changed."""
        memory = self.memory[rank]
        fields = {field.name: field for field in self.case.destination.model.fields}
        found, mask = memory.data.copy(), memory.cleared(fields, self.case.tokens)
        memory.poison()
        assert (found == memory.data)[~mask].all()

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


@contextlib.asynccontextmanager
async def pair(
    name: str, ranks: tuple[int, ...] = (), settings: AgentSettings | None = None
) -> AsyncIterator[Pair]:
    """Run all ranks of P, and the given ranks of D (none given: all)."""
    async with FakeBroker() as fake, contextlib.AsyncExitStack() as stack:
        made = Pair(make_case(name), fake)
        settings = settings or AgentSettings(staging_bytes=STAGING_BYTES)
        for side, memories in (("P", made.source), ("D", made.memory)):
            for rank, memory in memories.items():
                if side == "P" or not ranks or rank in ranks:
                    agent = AsyncAgent(fake.address, side, "life-1", rank, memory.regions, settings)
                    stack.push_async_callback(agent.close)
                    await agent.start()
                    made.agents[side, rank] = agent
        yield made
