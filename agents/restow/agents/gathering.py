"""What a source's agent gathers for readers, and holds until the broker gives it back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from restow.agents.binding import RegionTable, Tokens, bind_gather, staged_bytes
from restow.agents.chunks import bind_interleave
from restow.agents.copier import Copier
from restow.agents.digests import Hasher
from restow.agents.extents import one_extent, source_extents
from restow.agents.gradual import (
    COUNT_BYTES,
    COUNTS_IN_ORDER,
    GAIN,
    WORTHWHILE_BYTES,
    CountedRun,
    gather,
)
from restow.agents.memory import HOST, Place, Staging, one_place, staging_place
from restow.agents.orders import Progress, StagedRun, StageOrder
from restow.agents.parts import Parts
from restow.agents.pieces import Copies
from restow.agents.probing import check_room, measure_copying
from restow.agents.program_check import CheckedProgram
from restow.agents.spreading import Spreading
from restow.agents.staging import Run, StagingPool
from restow.broker.errors import RestowError
from restow.broker.layout.rows import Int64s
from restow.broker.planner import CopyCosts
from restow.broker.planner.interleave import INTERLEAVED_TO, aligned, chunk_bytes
from restow.broker.planner.program import Column, GroupPair, Program


@dataclass(frozen=True, slots=True)
class Share:
    """What goes into the run of one destination rank: first its chunk, then its packed rows."""

    dst_rank: int
    pairs: Sequence[GroupPair]
    interleaved: Int64s
    packed: Int64s
    chunk_bytes: int
    length_bytes: int

    @classmethod
    def of(cls, program: Program, rank: int, dst_rank: int, tokens: Tokens) -> Share:
        """The rows of source ``rank`` in the program of ``dst_rank``."""
        interleaved, packed = (
            rows[rows[:, Column.SRC_RANK] == rank] for rows in (program.interleaved, program.packed)
        )
        chunk = chunk_bytes(interleaved, INTERLEAVED_TO)
        length = chunk + staged_bytes(packed, program.group_pairs, tokens)
        return cls(dst_rank, program.group_pairs, interleaved, packed, chunk, length)

    @property
    def regions(self) -> list[int]:
        """Own regions that are copied from."""
        rows = np.concatenate([self.interleaved, self.packed])
        regions: list[int] = np.unique(rows[:, Column.SRC_REGION]).tolist()
        return regions

    def copies(self, memory: RegionTable, order: StageOrder, address: int) -> list[Copies]:
        """From own pages to the run at ``address``."""
        behind = address + self.chunk_bytes
        blocks, pairs = order.src_blocks, self.pairs
        return [
            bind_interleave(self.interleaved, pairs, memory, blocks, address),
            bind_gather(self.packed, pairs, memory, blocks, order.tokens, behind),
        ]


class Gathering:
    """Gathers for readers of one rank's pages into a pool. Belongs to one event loop."""

    def __init__(
        self,
        rank: int,
        memory: RegionTable,
        places: Sequence[Place],
        staging: Staging,
        copier: Copier,
    ) -> None:
        """Nothing is held yet."""
        self._rank = rank
        self._memory = memory
        self._places = places
        self._staging = staging
        self._copier = copier
        self._hasher = Hasher(memory, places, copier)
        self._pool = StagingPool(staging.size_bytes)
        self._runs: dict[int, list[Run]] = {}
        """By handoff; those of probes by their negative numbers."""
        self._gathered: set[Run] = set()
        """Those that are being gathered, and that nobody has given back."""
        self._held: dict[int, dict[int, StagedRun]] = {}
        self._spreading = Spreading(GAIN)

    @property
    def free_bytes(self) -> int:
        """Bytes of the pool in no run."""
        return self._pool.free_bytes

    async def stage(
        self,
        order: StageOrder,
        programs: Sequence[CheckedProgram],
        tell: Callable[[Sequence[StagedRun]], Awaitable[None]],
    ) -> None:
        """Gather for all parts, and hash what is asked for; ``programs`` are theirs.

        Who follows is ``tell``-ed where the runs are as soon as there is room for them, if they
        are large; others when all is there. Repeating changes nothing.

        Raises `OrderTooLargeError` and `StagingExhaustedError`; and, of who follows after having
        told, `PagesError`, `ProgramInvalidError` and `CopyFailedError`.
        """
        held = self._held.get(order.handoff, {})
        if all(part.dst_rank in held for part in order.parts):
            await tell([held[part.dst_rank] for part in order.parts])
            return
        shares = []
        for part, program in zip(order.parts, programs, strict=True):
            program.check_size(order.tokens, self._rank)
            shares.append(Share.of(program.program, self._rank, part.dst_rank, order.tokens))
        regions = [region for share in shares for region in share.regions]
        place = one_place(self._places, regions)
        size_bytes = sum(aligned(share.length_bytes) for share in shares)
        followed = self._may_be_followed(order, place, size_bytes)
        if followed:
            size_bytes += COUNT_BYTES * len(shares)
        # What is only hashed needs no room: there may be none.
        run = await self._pool.acquire(size_bytes) if size_bytes else None
        address = self._staging.address + (run.offset_bytes if run is not None else 0)
        if run is not None and followed:
            await self._gather_followed(shares, order, run, address, tell)
            return
        try:
            staged = await self._gather(shares, programs, order, address, place)
        except (RestowError, asyncio.CancelledError):
            if run is not None:
                self._pool.release(run)
            raise
        self._keep(order, run, staged)
        await tell(staged)

    async def _gather(
        self,
        shares: Sequence[Share],
        programs: Sequence[CheckedProgram],
        order: StageOrder,
        address: int,
        place: Place,
    ) -> list[StagedRun]:
        """All into runs from ``address`` on, in one launch, and hashed."""
        copies, staged = [], []
        for share in shares:
            copies += share.copies(self._memory, order, address)
            staged.append(StagedRun(share.dst_rank, address, share.length_bytes))
            address += aligned(share.length_bytes)
        await self._copier.run(Copies.joined(copies), place.device)
        if order.hashed:
            staged = [
                replace(one, digest=await self._digest(program.program, one, order))
                for one, program in zip(staged, programs, strict=True)
            ]
        return staged

    async def _gather_followed(
        self,
        shares: Sequence[Share],
        order: StageOrder,
        run: Run,
        address: int,
        tell: Callable[[Sequence[StagedRun]], Awaitable[None]],
    ) -> None:
        """Tell, and gather part by part. The run is kept even if that fails: it is being read."""
        counted, staged = [], []
        for share in shares:
            parts = Parts.of(address + COUNT_BYTES, share.length_bytes)
            one = StagedRun(share.dst_rank, parts.address, share.length_bytes)
            if parts.count:
                bind = partial(share.copies, self._memory, order, parts.address)
                counted.append(CountedRun(parts, address, bind))
                counted[-1].count(0)
                one = replace(one, progress=Progress(address, parts.part_bytes))
            staged.append(one)
            address = parts.address + aligned(share.length_bytes)
        self._keep(order, run, staged)
        self._gathered.add(run)
        try:
            await tell(staged)
            ran_s, took_s = await self._copier.on_thread(
                lambda: gather(counted, HOST.device, lambda: run in self._gathered)
            )
            self._spreading.saw(ran_s, took_s)
        finally:
            for each in counted:
                each.end()
            if run in self._gathered:
                self._gathered.remove(run)
            else:
                self._pool.release(run)

    def _may_be_followed(self, order: StageOrder, place: Place, size_bytes: int) -> bool:
        """Whether it may be, and is worth it: a digest is of complete runs, a launch is one."""
        in_host_memory = place == HOST == staging_place(self._places)
        return (
            order.followed
            and in_host_memory
            and COUNTS_IN_ORDER
            and not order.hashed
            and size_bytes >= WORTHWHILE_BYTES
            and size_bytes + COUNT_BYTES * len(order.parts) <= self._pool.size_bytes
            and self._spreading.allows()
        )

    def _keep(self, order: StageOrder, run: Run | None, staged: Sequence[StagedRun]) -> None:
        if run is not None:
            self._runs.setdefault(order.handoff, []).append(run)
        self._held.setdefault(order.handoff, {}).update({one.dst_rank: one for one in staged})

    async def _digest(self, program: Program, staged: StagedRun, order: StageOrder) -> bytes:
        """Of all that is read here by the rank for which ``program`` is."""
        run = one_extent(staged.address, staged.length_bytes)
        where = program, self._rank, self._memory
        read = source_extents(*where, order.src_blocks, order.tokens, run)
        return await self._hasher.digest(read)

    async def hold(self, probe: int, size_bytes: int) -> tuple[int, int, CopyCosts]:
        """Hold memory for a reader who measures; its address and length, and what copying costs.

        Raises `StagingExhaustedError`.
        """
        size_bytes = min(size_bytes, self._staging.size_bytes // 2)
        check_room(size_bytes)
        run = await self._pool.acquire(size_bytes)
        try:
            address = self._staging.address + run.offset_bytes
            costs = await measure_copying(address, size_bytes, staging_place(self._places))
        except (RestowError, asyncio.CancelledError):
            self._pool.release(run)
            raise
        self._runs.setdefault(-probe, []).append(run)
        return address, size_bytes, costs

    def let_go(self, probe: int) -> None:
        """Give the memory of a probe back. May be repeated."""
        self.unstage(-probe)

    def unstage(self, handoff: int) -> None:
        """Give a handoff's runs back. May be repeated."""
        self._held.pop(handoff, None)
        for run in self._runs.pop(handoff, ()):
            if run in self._gathered:
                self._gathered.remove(run)  # who gathers gives it back: it is written to until then
            else:
                self._pool.release(run)

    def reset(self) -> None:
        """Give all runs back, and forget what was only hashed."""
        for handoff in {*self._runs, *self._held}:
            self.unstage(handoff)
