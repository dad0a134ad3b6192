"""The interpreter of programs: GATHER at the source; READ, SCATTER, PROJECT and CLEAR at D.

Knows rows, pages and bytes, and neither heads nor gRPC. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from restow.agents.binding.copies import bind_copies
from restow.agents.binding.operands import DST, in_order, paged
from restow.agents.copying.copier import Copier
from restow.agents.copying.hasher import Hasher
from restow.agents.copying.prepared_copies import zero_destinations
from restow.agents.copying.projecting import window_rows
from restow.agents.errors import OrderInvalidError, ProgramInvalidError, ReadNotBegunError
from restow.agents.execute.arrivals import Arrivals, joined_reads
from restow.agents.execute.comparing import check_digests_are_there, compare
from restow.agents.execute.gathering import Gathering
from restow.agents.execute.laid_rows import LaidRows, PeerRows
from restow.agents.execute.program_check import CheckedProgram
from restow.agents.link.orders import ExecuteOrder, Peer, ProbeOrder, StagedRun, StageOrder
from restow.agents.memory.regions import (
    RegionMemory,
    are_at,
    one_place,
    region_table,
)
from restow.agents.memory.staging import Staging, staging_place
from restow.agents.memory.staging_pool import Run, StagingPool
from restow.agents.probing.costs import check_room, measure_copying, measure_reading
from restow.agents.probing.transport_name import TransportName, find_transport
from restow.agents.probing.transport_probe import OneRead
from restow.agents.reading.lane import late
from restow.agents.reading.reader import Reader
from restow.agents.reading.transport import Read
from restow.broker.errors import PagesError, RestowError
from restow.broker.layout.rows import Int64s
from restow.broker.planner import CopyCosts, ReadCosts
from restow.broker.planner.program import (
    CLEAR_PAGES,
    PROJECT_SPANS,
    Column,
    Operand,
    Program,
    no_rows,
)

PROBE_S = 2.0
"""How long the reads of a measurement may take."""
BEGIN_WITHIN = 0.8
"""The part of a grant within which staging may come free: a read that begins later ends too late,
and fails the handoff, where one that has not begun is granted anew."""
EXAMINED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ReadReport:
    """What an `Executor.execute` did."""

    bytes_read: int
    elapsed_s: float
    compared: bool = False
    """Whether what was read is known to be what its sources hashed."""


class Executor:
    """Executes the orders of one rank's agent.

    Gathering and scattering have a staging pool each: with one pool, two agents that hand over to
    each other could wait for each other's runs for ever.
    """

    def __init__(
        self,
        rank: int,
        regions: Sequence[RegionMemory],
        gather_staging: Staging,
        scatter_staging: Staging,
        reader: Reader,
        copier: Copier,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Serve ``regions``, in the order of the rank's layout."""
        self._rank = rank
        self._memory = region_table(regions)
        self._places = tuple(region.place for region in regions)
        self._strides = tuple(region.page_stride_bytes for region in regions)
        self._constant = tuple(region.private for region in regions)
        self._copier = copier
        self._hasher = Hasher(self._memory, self._places, copier)
        self._gathering = Gathering(rank, self._memory, self._places, gather_staging, copier)
        self._scatter_staging = scatter_staging
        self._scatter_pool = StagingPool(scatter_staging.size_bytes)
        self._reader = reader
        self._clock = clock
        self._programs: dict[str, CheckedProgram | RestowError] = {}
        self._peers: dict[str, Peer] = {}
        self._laid = LaidRows(self._memory, self._places)

    @property
    def free_staging_bytes(self) -> tuple[int, int]:
        """Bytes free for gathering, and for scattering."""
        return self._gathering.free_bytes, self._scatter_pool.free_bytes

    def load(self, program: Program) -> None:
        """Take a program; one that is invalid refuses the orders that name it."""
        self._laid.forget_program(program.program_id)
        try:
            self._programs[program.program_id] = CheckedProgram(program)
        except ProgramInvalidError as error:
            self._programs[program.program_id] = error

    def refuse(self, program_id: str, error: RestowError) -> None:
        """Refuse the orders that name a program which could not be read."""
        self._laid.forget_program(program_id)
        self._programs[program_id] = error

    def add_peer(self, peer: Peer) -> None:
        """Know an agent to read from."""
        self._laid.forget_peer(peer.agent_name)
        self._peers[peer.agent_name] = peer
        self._reader.add_peer(peer.agent_name, peer.metadata, peer.host_memory)

    def forget_peer(self, agent_name: str) -> None:
        """A peer is gone; what is read from it fails. May be repeated."""
        self._peers.pop(agent_name, None)
        self._laid.forget_peer(agent_name)
        self._reader.forget_peer(agent_name)

    def reset(self) -> None:
        """Drop all programs, peers and staged runs; nothing may be executing."""
        for name in list(self._peers):
            self.forget_peer(name)
        self._gathering.reset()
        self._programs.clear()
        self._laid.clear()

    async def stage(self, order: StageOrder) -> Sequence[StagedRun]:
        """Gather and hash for some readers; returns where each one's run is.

        Repeating changes nothing. Raises what `Gathering.stage` does, and `OrderInvalidError`.
        """
        programs = [self._program(part.program_id) for part in order.parts]
        for program in programs:
            program.check_source(self._rank, self._strides, self._constant)
        return await self._gathering.stage(order, programs)

    def unstage(self, handoff: int) -> None:
        """Give a handoff's staged runs back. May be repeated."""
        self._gathering.unstage(handoff)

    async def hold(self, order: ProbeOrder) -> tuple[int, int, CopyCosts]:
        """Hold memory for a reader who measures. Raises `StagingExhaustedError`."""
        return await self._gathering.hold(order.number, order.size_bytes)

    def let_go(self, probe: int) -> None:
        """Give the memory of a probe back. May be repeated."""
        self._gathering.let_go(probe)

    async def measure(self, order: ProbeOrder) -> tuple[CopyCosts, ReadCosts]:
        """What copying costs here, and what reading from the peer does.

        Raises `OrderInvalidError`, `StagingExhaustedError`, and what `Reader.read` raises.
        """
        peer = self._peer(order.agent_name)
        place = staging_place(self._places)
        size_bytes = min(order.size_bytes, self._scatter_staging.size_bytes // 2)
        check_room(size_bytes)
        run = await self._scatter_pool.acquire(size_bytes)
        try:
            address = self._scatter_staging.address + run.offset_bytes
            return await measure_copying(address, size_bytes, place), await measure_reading(
                self._reader,
                peer.agent_name,
                order.address,
                address,
                size_bytes,
                (peer.staging_place, place),
                self._clock() + PROBE_S,
            )
        finally:
            self._scatter_pool.release(run)

    async def name_transport(self, order: ProbeOrder) -> TransportName:
        """Over what the peer is read. Raises `OrderInvalidError` and `ReadFailedError`."""
        peer = self._peer(order.agent_name)
        one = OneRead(
            peer.agent_name,
            order.address,
            min(order.size_bytes, EXAMINED_BYTES),
            peer.staging_place,
            staging_place(self._places),
            PROBE_S,
        )
        found = await asyncio.to_thread(find_transport, one, peer.metadata)
        words = self._reader.words(peer.agent_name)
        return found._replace(method=f"{found.method}, {words}") if words else found

    async def execute(self, order: ExecuteOrder) -> ReadReport:
        """Fill own pages from the sources, or zero the snapshots that a failed order would fill.

        No byte lands in own pages after this has returned or raised. Raises `OrderInvalidError`,
        `ProgramInvalidError`, `OrderTooLargeError`, `PagesError`, `StagingExhaustedError`,
        `ReadNotBegunError`, `ReadDeadlineError`, `PeerLostError`, `ReadFailedError`,
        `DigestMissingError`, `DigestMismatchError`.
        """
        began_s = self._clock()
        deadline_s = began_s + order.grant_s
        program = self._program(order.program_id)
        program.check_destination(self._strides, self._constant)
        try:
            begin_until_s = began_s + BEGIN_WITHIN * order.grant_s
            bytes_read = await self._fill(program, order, begin_until_s, deadline_s)
            ended_s = self._clock()
            if ended_s > deadline_s:
                raise late()
        except RestowError:
            self._clear(program.program, order)
            raise
        return ReadReport(bytes_read, ended_s - began_s, order.hashed)

    # -- inside -----------------------------------------------------------------------------------

    def _program(self, program_id: str) -> CheckedProgram:
        program = self._programs.get(program_id)
        if program is None:
            raise OrderInvalidError(f"program {program_id} was not sent", program=program_id)
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
        """READ, then SCATTER, then PROJECT. Returns the bytes read."""
        whole = program.program
        missing = program.src_ranks - {source.src_rank for source in order.sources}
        if missing:
            raise OrderInvalidError(f"no source is given for ranks {sorted(missing)}")
        check_digests_are_there(order)
        peers = [self._peer(source.agent_name) for source in order.sources]
        for source, peer in zip(order.sources, peers, strict=True):
            program.check_source(source.src_rank, peer.page_strides_bytes)
        program.check_size(order.tokens)
        place = one_place(self._places, program.staged_regions)
        arrivals = Arrivals(self._laid.arriving(whole), order)
        run = await self._acquire(arrivals.length_bytes, begin_until_s)
        if run is not None:
            arrivals.put_at(self._scatter_staging.address + run.offset_bytes)
        # The run may be given back whatever happens: nothing lands after the end of a read. Only a
        # cancelled task (the agent ends) leaves before; then there is no next user.
        try:
            reads: list[Read] = []
            for source, peer in zip(order.sources, peers, strict=True):
                laid = self._laid.from_peer(whole, source.src_rank, peer)
                reads += _direct_reads(laid, order, peer)
                reads += arrivals.reads(source, peer, laid.spans, place)
            reads = joined_reads(reads)
            turns = [
                self._copier.prepare(copies, place.device)
                for copies in arrivals.copies(self._memory, place.device)
            ]
            await self._reader.read(reads, deadline_s)
            if order.hashed:
                # After the grant P may use its pages: then they differ for no fault of anybody's.
                if self._clock() > deadline_s:
                    raise late()
                await compare(whole, order, arrivals, self._memory, self._hasher)
            for turn in turns:
                await turn()
            if len(whole.rows(PROJECT_SPANS)):
                await self._copier.project(arrivals.projections(self._memory), place.device)
            self._zero(whole.rows(CLEAR_PAGES), whole, order)
        finally:
            if run is not None:
                self._scatter_pool.release(run)
        return sum(read.descriptors.size_bytes for read in reads)

    async def _acquire(self, length_bytes: int, begin_until_s: float) -> Run | None:
        if not length_bytes:
            return None
        try:
            async with asyncio.timeout(begin_until_s - self._clock()):
                return await self._scatter_pool.acquire(length_bytes)
        except TimeoutError:
            raise ReadNotBegunError(
                f"no {length_bytes} bytes of staging were free until the grant had nearly ended"
            ) from None

    def _peer(self, agent_name: str) -> Peer:
        peer = self._peers.get(agent_name)
        if peer is None:
            raise OrderInvalidError(f"agent {agent_name} was not introduced", agent=agent_name)
        return peer

    def _clear(self, program: Program, order: ExecuteOrder) -> None:
        """CLEAR: a failed handoff leaves no snapshot behind, neither half of one nor an older one.

        Per-token pages are never read beyond the tokens that their request has computed.
        """
        per_token = np.array([pair.per_token for pair in program.group_pairs], bool)
        tables = [
            window_rows(step.rows) if step.form == PROJECT_SPANS else step.rows
            for step in program.steps
            if step.form.dst is Operand.PAGES
        ]
        rows = np.concatenate([no_rows(), *tables])
        rows = rows[~per_token[rows[:, Column.GROUP_PAIR]]]
        # Page ids that were refused name nothing that could be cleared.
        with contextlib.suppress(PagesError):
            self._zero(rows, program, order)

    def _zero(self, rows: Int64s, program: Program, order: ExecuteOrder) -> None:
        if not len(rows):
            return
        pairs, tokens = program.group_pairs, order.tokens
        pages = paged(self._memory, DST, order.dst_blocks)
        for place in set(self._places):
            part = rows[are_at(self._places, place)[rows[:, Column.DST_REGION]]]
            run = in_order(part, pairs, tokens, 0)
            copies = bind_copies(part, pairs, run, pages, tokens)
            zero_destinations(copies, place.device)


def _direct_reads(laid: PeerRows, order: ExecuteOrder, peer: Peer) -> Iterator[Read]:
    for src, dst, reads in laid.direct:
        descriptors = reads.bind(order.src_blocks, order.dst_blocks, order.tokens)
        if len(descriptors.length_bytes):
            yield Read(peer.agent_name, descriptors, src, dst)
