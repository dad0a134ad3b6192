"""Runs: bytes that a source rank gathers for one reader, and the reader scatters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from restow.agents.binding.copies import RowCopies
from restow.agents.binding.extents import one_extent, source_extents
from restow.agents.binding.operands import DST, SRC, BoundOperand, by_place, in_order, paged
from restow.agents.binding.pages import RegionTable, TokenRange, staged_bytes
from restow.agents.copying.copier import Hasher
from restow.agents.execute.orders import StagedRun, StageOrder
from restow.agents.execute.program_check import CheckedProgram
from restow.agents.memory.regions import MemoryPlace
from restow.agents.memory.staging import PoolFigures, Staging, StagingPool, StagingRun
from restow.agents.probing.costs import KnownCosts, check_room, measure_copying
from restow.broker.layout.rows import Int64s
from restow.broker.planner import CopyCosts
from restow.broker.planner.program import (
    GATHER_IN_ORDER,
    GATHER_PLACED,
    INTERLEAVED_TO,
    RESTORED_FROM,
    SCATTER_PLACED,
    GroupPair,
    Program,
    aligned,
    chunk_bytes,
)


@dataclass(frozen=True, slots=True)
class GatheredRun:
    """A run: a chunk whose rows have given places, followed by packed rows in order."""

    name: tuple[str, int]
    """The program's id and the source rank."""
    pairs: Sequence[GroupPair]
    tokens: TokenRange
    placed: Int64s
    packed: Int64s
    chunk_bytes: int
    length_bytes: int

    @classmethod
    def at_source(cls, program: Program, src_rank: int, tokens: TokenRange) -> GatheredRun:
        """Return the run that ``src_rank`` gathers for the reader with this program."""
        placed = program.rows(GATHER_PLACED, src_rank)
        return cls._of(program, src_rank, tokens, placed, chunk_bytes(placed, INTERLEAVED_TO))

    @classmethod
    def at_destination(cls, program: Program, src_rank: int, tokens: TokenRange) -> GatheredRun:
        """Return the same run from the reader's side."""
        placed = program.rows(SCATTER_PLACED, src_rank)
        return cls._of(program, src_rank, tokens, placed, chunk_bytes(placed, RESTORED_FROM))

    @classmethod
    def _of(
        cls, program: Program, src_rank: int, tokens: TokenRange, placed: Int64s, chunk: int
    ) -> GatheredRun:
        packed, pairs = program.rows(GATHER_IN_ORDER, src_rank), program.group_pairs
        length = chunk + staged_bytes(packed, pairs, tokens)
        name = program.program_id, src_rank
        return cls(name, pairs, tokens, placed, packed, chunk, length)

    def gather(self, pages: BoundOperand, address: int) -> list[RowCopies]:
        """Return copies from the source's pages to the run at ``address``."""
        return [
            self._copies("gathered", rows, pages, run)
            for rows, run in (
                (self.placed, by_place(address, DST)),
                (self.packed, self._packed_rows(address)),
            )
            if len(rows)
        ]

    def scatter(self, pages: BoundOperand, address: int) -> list[RowCopies]:
        """Return copies from the run at ``address`` to the destination's pages."""
        return [
            self._copies("scattered", rows, run, pages)
            for rows, run in (
                (self.placed, by_place(address, SRC)),
                (self.packed, self._packed_rows(address)),
            )
            if len(rows)
        ]

    def _copies(self, verb: str, rows: Int64s, src: BoundOperand, dst: BoundOperand) -> RowCopies:
        part = "placed" if rows is self.placed else "packed"
        return RowCopies((*self.name, verb, part), rows, self.pairs, src, dst, self.tokens)

    def _packed_rows(self, address: int) -> BoundOperand:
        """Return the packed rows of the run at ``address`` as an operand."""
        return in_order(self.packed, self.pairs, self.tokens, address + self.chunk_bytes)


class Gathering:
    """Gathers from one rank's pages into a pool, for readers. Belongs to one event loop."""

    def __init__(
        self,
        rank: int,
        memory: RegionTable,
        place: MemoryPlace,
        staging: Staging,
        hasher: Hasher,
    ) -> None:
        """Gather from ``memory`` into ``staging``, both at ``place``; hash with ``hasher``."""
        self._rank = rank
        self._memory = memory
        self._place = place
        self._staging = staging
        self._hasher = hasher
        self._copier = hasher.copier
        self._pool = StagingPool(staging.size_bytes)
        self._runs: dict[int, list[StagingRun]] = {}
        """Runs by handoff number; a probe's runs by its negated number."""
        self._costs = KnownCosts[CopyCosts]()
        """The costs of copying, by size."""
        self._held: dict[int, dict[int, StagedRun]] = {}

    @property
    def figures(self) -> PoolFigures:
        """Use of the pool."""
        return self._pool.figures

    async def stage(
        self, order: StageOrder, programs: Sequence[CheckedProgram]
    ) -> Sequence[StagedRun]:
        """Gather for all parts, and hash if asked to; ``programs`` belong to the parts.

        Returns the run of each part. Repeating an order changes nothing. Raises
        `OrderTooLargeError`, `StagingExhaustedError`, `PagesError`, `ProgramInvalidError` and
        `CopyFailedError`.
        """
        held = self._held.get(order.handoff, {})
        if all(part.dst_rank in held for part in order.parts):
            return [held[part.dst_rank] for part in order.parts]
        for program in programs:
            program.check_size(order.tokens, self._rank)
        gathered = [
            GatheredRun.at_source(program.program, self._rank, order.tokens) for program in programs
        ]
        size_bytes = sum(aligned(gathered_run.length_bytes) for gathered_run in gathered)
        # Reads that are only hashed take no staging, of which the agent may have none.
        run = await self._pool.acquire(size_bytes) if size_bytes else None
        address = self._staging.address + (run.offset_bytes if run is not None else 0)
        try:
            staged = await self._gather(gathered, programs, order, address)
        except BaseException:
            if run is not None:
                self._pool.release(run)
            raise
        if run is not None:
            self._runs.setdefault(order.handoff, []).append(run)
        self._held.setdefault(order.handoff, {}).update(
            {staged_run.dst_rank: staged_run for staged_run in staged}
        )
        return staged

    async def _gather(
        self,
        gathered: Sequence[GatheredRun],
        programs: Sequence[CheckedProgram],
        order: StageOrder,
        address: int,
    ) -> list[StagedRun]:
        """Gather all parts into runs from ``address`` on, in one launch, and hash them."""
        pages = paged(self._memory, SRC, order.src_blocks)
        copies: list[RowCopies] = []
        staged = []
        for part, gathered_run in zip(order.parts, gathered, strict=True):
            copies += gathered_run.gather(pages, address)
            staged.append(StagedRun(part.dst_rank, address, gathered_run.length_bytes))
            address += aligned(gathered_run.length_bytes)
        await self._copier.run(self._copier.bind(copies))
        if order.hashed:
            staged = [
                replace(staged_run, digest=await self._digest(program.program, staged_run, order))
                for staged_run, program in zip(staged, programs, strict=True)
            ]
        return staged

    async def _digest(self, program: Program, staged: StagedRun, order: StageOrder) -> bytes:
        """Return the digest of all bytes that the rank of ``program`` reads here."""
        run = one_extent(staged.address, staged.length_bytes)
        where = program, self._rank, self._memory
        read = source_extents(*where, order.src_blocks, order.tokens, run)
        return await self._hasher.digest(read)

    async def hold(self, probe: int, size_bytes: int) -> tuple[int, int, CopyCosts]:
        """Hold memory for a reader that measures; return its address, length and copy costs.

        Raises `StagingExhaustedError` and `CopyFailedError`.
        """
        size_bytes = min(size_bytes, self._staging.size_bytes // 2)
        check_room(size_bytes)
        run = await self._pool.acquire(size_bytes)
        try:
            address = self._staging.address + run.offset_bytes
            costs = self._costs.get(size_bytes) or self._costs.keep(
                size_bytes, await measure_copying(address, size_bytes, self._place)
            )
        except BaseException:
            self._pool.release(run)
            raise
        self._runs.setdefault(-probe, []).append(run)
        return address, size_bytes, costs

    def let_go(self, probe: int) -> None:
        """Release the memory of a probe. May be called again."""
        self.unstage(-probe)

    def unstage(self, handoff: int) -> None:
        """Release a handoff's runs. May be called again."""
        self._held.pop(handoff, None)
        for run in self._runs.pop(handoff, ()):
            self._pool.release(run)

    def reset(self) -> None:
        """Release all runs, and forget what was only hashed."""
        for handoff in {*self._runs, *self._held}:
            self.unstage(handoff)
