"""The interpreter of programs: GATHER at the source; READ, SCATTER, PROJECT and CLEAR at D.

It knows rows, pages and bytes, but neither heads nor gRPC. It belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from restow.agents.copying.copier import Copier, Hasher
from restow.agents.execute.fences import WriteMarks
from restow.agents.execute.gathering import Gathering
from restow.agents.execute.order_reads import (
    KeptReads,
    StagedReads,
    check_digests_are_there,
    cleared,
    compare,
    joined_reads,
    snapshots,
)
from restow.agents.execute.orders import ExecuteOrder, Peer, ProbeOrder, StagedRun, StageOrder
from restow.agents.execute.program_check import CheckedProgram
from restow.agents.memory.errors import (
    CopyFailedError,
    OrderInvalidError,
    ProgramInvalidError,
    ReadNotBegunError,
)
from restow.agents.memory.regions import RegionMemory, common_place, region_table
from restow.agents.memory.staging import PoolFigures, Staging, StagingPool
from restow.agents.probing.costs import (
    KnownCosts,
    check_room,
    measure_copying,
    measure_reading,
)
from restow.agents.probing.ucx_transport import OneRead, TransportName, find_transport
from restow.agents.reading.lane import Read, late
from restow.agents.reading.reader import Reader
from restow.broker.errors import PagesError, RestowError
from restow.broker.planner import CopyCosts, ReadCosts
from restow.broker.planner.program import PROJECT_SPANS, Program

PROBE_S = 2.0
"""Time limit of the reads of a measurement."""
EXAMINED_BYTES = 1 << 20
BEGIN_WITHIN = 0.8
"""Part of a grant within which staging must become free and the engine's own writes must end.

A read that begins later would end too late and fail the handoff. A read that has not begun is
granted again instead.
"""


class Executor:
    """Executes the orders of one rank's agent.

    Gathering and scattering have separate staging pools. With a single pool, two agents that hand
    over to each other could wait for each other's runs for ever.
    """

    def __init__(
        self,
        rank: int,
        regions: Sequence[RegionMemory],
        gather_staging: Staging,
        scatter_staging: Staging,
        reader: Reader,
        copier: Copier,
        writes: WriteMarks,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Serve ``regions``, in the order of the rank's layout; ``writes`` are the engine's own.

        Raises `RegionInvalidError` if regions lie at several places.
        """
        self._rank = rank
        self._memory = region_table(regions)
        self._place = place = common_place(regions)
        self._strides = tuple(region.page_stride_bytes for region in regions)
        self._constant = tuple(region.private for region in regions)
        self._copier = copier
        self._hasher = Hasher(place, copier)
        self.gathering = Gathering(rank, self._memory, place, gather_staging, self._hasher)
        """Runs that readers read from this rank."""
        self._scatter_staging = scatter_staging
        self._scatter_pool = StagingPool(scatter_staging.size_bytes)
        self._reader = reader
        self._writes = writes
        self._clock = clock
        self._programs: dict[str, CheckedProgram | RestowError] = {}
        self._peers: dict[str, Peer] = {}
        self._reads = KeptReads(self._memory, place)
        self._costs = KnownCosts[tuple[CopyCosts, ReadCosts]](clock)
        """Measured costs, by the name and NIXL metadata of a peer."""

    @property
    def staging(self) -> tuple[PoolFigures, PoolFigures]:
        """Use of the staging pools, for gathering and for scattering."""
        return self.gathering.figures, self._scatter_pool.figures

    def load(self, program: Program) -> None:
        """Take a program; orders that name an invalid program are refused."""
        self._forget_program(program.program_id)
        try:
            self._programs[program.program_id] = CheckedProgram(program)
        except ProgramInvalidError as error:
            self._programs[program.program_id] = error

    def refuse(self, program_id: str, error: RestowError) -> None:
        """Refuse all orders that name a program which could not be read."""
        self._forget_program(program_id)
        self._programs[program_id] = error

    def _forget_program(self, program_id: str) -> None:
        self._reads.forget_program(program_id)
        self._copier.forget_program(program_id)

    def add_peer(self, peer: Peer) -> None:
        """Add an agent to read from."""
        self._reads.forget_peer(peer.agent_name)
        self._peers[peer.agent_name] = peer
        self._reader.add_peer(peer.agent_name, peer.metadata, peer.host_memory)

    def forget_peer(self, agent_name: str) -> None:
        """Forget a peer that is gone; reads from it fail. May be called again."""
        self._peers.pop(agent_name, None)
        self._reads.forget_peer(agent_name)
        self._reader.forget_peer(agent_name)

    def reset(self) -> None:
        """Drop all programs, peers and staged runs; nothing may be executing."""
        for name in list(self._peers):
            self.forget_peer(name)
        self.gathering.reset()
        self._programs.clear()
        self._reads.clear()
        self._copier.forget_programs()

    async def stage(self, order: StageOrder) -> Sequence[StagedRun]:
        """Gather and hash for some readers; return the address of each reader's run.

        Repeating an order changes nothing. Raises what `Gathering.stage` does, and
        `OrderInvalidError`.
        """
        programs = [self._program(part.program_id) for part in order.parts]
        for program in programs:
            program.check_source(self._rank, self._strides, self._constant)
        return await self.gathering.stage(order, programs)

    async def measure(self, order: ProbeOrder) -> tuple[CopyCosts, ReadCosts]:
        """Measure what copying costs here, and what reading from the peer costs.

        Measures in the staging memory that reads arrive in, or returns what was measured a short
        time ago. Raises `OrderInvalidError`, `StagingExhaustedError`, and what `Reader.read`
        raises.
        """
        peer, staging = self._peer(order.agent_name), self._scatter_staging
        named = peer.agent_name, peer.metadata
        if (known := self._costs.get(named)) is not None:
            return known
        size_bytes = min(order.size_bytes, staging.size_bytes // 2)
        check_room(size_bytes)
        run = await self._scatter_pool.acquire(size_bytes)
        try:
            address = staging.address + run.offset_bytes
            copying = await measure_copying(address, size_bytes, self._place)
            reading = await measure_reading(
                self._reader,
                peer.agent_name,
                order.address,
                address,
                size_bytes,
                (peer.place, self._place),
                self._clock() + PROBE_S,
            )
            return self._costs.keep(named, (copying, reading))
        finally:
            self._scatter_pool.release(run)

    async def name_transport(self, order: ProbeOrder) -> TransportName:
        """Return the peer's transport. Raises `OrderInvalidError` and `ReadFailedError`."""
        peer = self._peer(order.agent_name)
        size_bytes = min(order.size_bytes, EXAMINED_BYTES)
        ends = peer.place, self._place
        read = OneRead(peer.agent_name, order.address, size_bytes, *ends, PROBE_S)
        return await asyncio.to_thread(find_transport, read, peer.metadata)

    async def execute(self, order: ExecuteOrder) -> int:
        """Fill own pages from the sources, and return the bytes read.

        If the order fails, zero the snapshots that it would fill.
        No byte lands in own pages after this has returned or raised, unless the task is cancelled.
        Raises `OrderInvalidError`, `ProgramInvalidError`, `OrderTooLargeError`, `PagesError`,
        `StagingExhaustedError`, `ReadNotBegunError`, `ReadDeadlineError`, `PeerLostError`,
        `ReadFailedError`, `DigestMissingError`, `DigestMismatchError` and `CopyFailedError`.
        """
        began_s = self._clock()
        deadline_s = began_s + order.grant_s
        program = self._program(order.program_id)
        program.check_destination(self._strides, self._constant)
        begin_until_s = began_s + BEGIN_WITHIN * order.grant_s
        # The engine may still write before the mark, so nothing may be zeroed until then either.
        await self._writes.reach(order.write_mark, begin_until_s - began_s)
        try:
            bytes_read = await self._fill(program, order, begin_until_s, deadline_s)
            if self._clock() > deadline_s:
                raise late()
        except Exception as error:
            await self._clear_failed(program.program, order, error)
            raise
        return bytes_read

    # -- inside -----------------------------------------------------------------------------------

    async def _clear_failed(self, program: Program, order: ExecuteOrder, cause: Exception) -> None:
        """Zero what a failed order would fill. Raises `CopyFailedError`, which names ``cause``."""
        try:
            # Page ids that were refused name nothing that could be cleared.
            with contextlib.suppress(PagesError):
                await self._copier.clear(snapshots(program, order, self._memory))
        except CopyFailedError as error:
            raise CopyFailedError(
                f"{cause}; clearing the order's snapshots failed too: {error.message}"
            ) from cause

    def _program(self, program_id: str) -> CheckedProgram:
        program = self._programs.get(program_id)
        if program is None:
            raise OrderInvalidError(
                f"the broker did not send program {program_id} before this order",
                program=program_id,
            )
        if isinstance(program, RestowError):
            raise program
        return program

    async def _fill(
        self,
        program: CheckedProgram,
        order: ExecuteOrder,
        begin_until_s: float,
        deadline_s: float,
    ) -> int:
        """Execute READ, SCATTER with CLEAR, then PROJECT; return the bytes read."""
        whole = program.program
        self._check(program, order)
        staged = StagedReads(whole, order)
        async with self._room_for(staged, begin_until_s):
            reads = self._bind(whole, order, staged)
            parts = [*staged.copies(self._memory), *cleared(whole, order, self._memory)]
            copies = self._copier.bind(parts)
            await self._reader.read(reads, deadline_s)
            if order.hashed:
                # After the grant P may reuse its pages, and the bytes would differ without a fault.
                if self._clock() > deadline_s:
                    raise late()
                await compare(whole, order, staged, self._memory, self._hasher)
            await self._copier.run(copies)
            if len(whole.rows(PROJECT_SPANS)):
                await self._copier.project(staged.projections(self._memory))
        return sum(read.descriptors.size_bytes for read in reads)

    def _check(self, program: CheckedProgram, order: ExecuteOrder) -> None:
        """Check the order's sources before anything is read in vain."""
        missing = program.src_ranks - {source.src_rank for source in order.sources}
        if missing:
            raise OrderInvalidError(f"no source is given for ranks {sorted(missing)}")
        check_digests_are_there(order)
        for source in order.sources:
            strides = self._peer(source.agent_name).page_strides_bytes
            program.check_source(source.src_rank, strides)
        program.check_size(order.tokens)

    def _bind(self, program: Program, order: ExecuteOrder, staged: StagedReads) -> list[Read]:
        """Return the READ of all pieces from all sources."""
        reads: list[Read] = []
        for source in order.sources:
            peer = self._peer(source.agent_name)
            reads += self._reads.of(program, source.src_rank, peer).bind(order, staged.spans)
            reads += staged.reads(source, peer, self._place)
        return joined_reads(reads)

    @asynccontextmanager
    async def _room_for(self, staged: StagedReads, begin_until_s: float) -> AsyncIterator[None]:
        """Give what is staged room in the pool, and release it however the body ends.

        Nothing lands after the end of a read. Only a cancelled task leaves earlier; then the agent
        is ending, and nobody uses the pool afterwards.
        """
        if not staged.length_bytes:
            yield
            return
        try:
            async with asyncio.timeout(begin_until_s - self._clock()):
                run = await self._scatter_pool.acquire(staged.length_bytes)
        except TimeoutError:
            raise ReadNotBegunError(
                f"{staged.length_bytes} bytes of staging did not become free in the time of the "
                f"grant; start the agent with more staging, or let fewer handoffs run at once"
            ) from None
        try:
            staged.put_at(self._scatter_staging.address + run.offset_bytes)
            yield
        finally:
            self._scatter_pool.release(run)

    def _peer(self, agent_name: str) -> Peer:
        peer = self._peers.get(agent_name)
        if peer is None:
            raise OrderInvalidError(
                f"the broker did not introduce agent {agent_name} before this order",
                agent=agent_name,
            )
        return peer
