"""A transfer between two engines, with the agents' own staging and binding, and what it moved.

Memory is the arena of the reference executor, which alone reads, copies and multiplies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from laws.executor import bytes_read_by
from laws.world import Engine
from restow.agents.binding.copies import RowCopies, bind_copies
from restow.agents.binding.operands import DST, SRC, in_spans, paged
from restow.agents.binding.pages import STAGING_ALIGN_BYTES, RegionTable, TokenRange
from restow.agents.execute.gathering import GatheredRun
from restow.agents.execute.order_reads import KeptReads, StagedReads, cleared, snapshots
from restow.agents.execute.orders import ExecuteOrder, Peer, Source
from restow.agents.memory.regions import HOST
from restow.agents.reading.lane import Read
from restow.broker.planner import Plan, Program, Strategy, compile_programs, make_plan
from restow.broker.planner.program import (
    GATHER_IN_ORDER,
    PROJECT_SPANS,
    READ_PAGES,
    READ_SPANS,
    SCATTER_SPANS,
    Column,
    Form,
)

GUARD_BYTES = 16


@dataclass(slots=True)
class Traffic:
    """What a transfer did."""

    read_bytes: Counter[int] = field(default_factory=Counter)
    """Bytes of state that each destination rank took out of source pages."""
    wire_bytes: int = 0
    span_bytes: Counter[tuple[int, int]] = field(default_factory=Counter)
    """What was read as spans of pages, by source and destination rank."""
    reads: int = 0
    launches: int = 0


class Reading:
    """What one rank of D does by a program, and the ranks of P that it reads from."""

    def __init__(
        self, program: Program, source: Engine, destination: Engine, tokens: TokenRange
    ) -> None:
        """Let the ranks of P gather, and lay out the staging of D's rank."""
        self.program, self.arena = program, source.arena
        self.memory = destination.regions(program.dst_rank)
        self.peers: dict[int, Peer] = {}
        self.gathered_bytes = 0
        self.launches: list[list[RowCopies]] = []
        """Parts that a device copies in one launch."""
        sources = []
        for rank in program.src_ranks:
            memory = source.regions(rank)
            run = GatheredRun.at_source(program, rank, tokens)
            staged = self._allocate(run.length_bytes)
            parts = run.gather(paged(memory, SRC, source.blocks), staged)
            self.launches.append(parts)
            for part in parts:
                copies = part.bind()
                self.arena.copy(copies)
                self.gathered_bytes += bytes_read_by(copies)
            self.peers[rank] = Peer("p", rank, b"", memory, HOST)
            sources.append(Source(rank, "p", staged if run.length_bytes else 0, run.length_bytes))
        self.order = ExecuteOrder(
            handoff=1,
            program_id=program.program_id,
            src_blocks=source.blocks,
            dst_blocks=destination.blocks,
            tokens=tokens,
            sources=tuple(sources),
            grant_s=1.0,
        )
        self.staged = StagedReads(program, self.order)
        self.staged.put_at(self._allocate(self.staged.length_bytes))
        scattered, zeroed = self.staged.copies(self.memory), cleared(*self._cleared)
        self.launches += [[*scattered, *zeroed], snapshots(*self._cleared)]

    @property
    def _cleared(self) -> tuple[Program, ExecuteOrder, RegionTable]:
        return self.program, self.order, self.memory

    def _allocate(self, size_bytes: int) -> int:
        self.arena.used += -self.arena.address(self.arena.used) % STAGING_ALIGN_BYTES
        return self.arena.address(self.arena.allocate(size_bytes, GUARD_BYTES))

    def reads(self, source: Source) -> Iterator[tuple[Form, Read]]:
        """Yield the reads from one source, each with the form of its rows."""
        peer = self.peers[source.src_rank]
        kept = KeptReads(self.memory, HOST).of(self.program, source.src_rank, peer)
        parts = (READ_PAGES, kept.direct), (READ_SPANS, kept.spans)
        forms = [form for form, part in parts if part is not None]
        yield from zip(forms, kept.bind(self.order, self.staged.spans), strict=True)
        for read in self.staged.reads(source, peer, HOST):
            yield GATHER_IN_ORDER, read

    def extracted_bytes(self) -> int:
        """Return how many bytes are copied out of spans."""
        program, tokens = self.program, self.order.tokens
        rows = program.rows(SCATTER_SPANS)
        spans = in_spans(self.staged.spans, rows[:, Column.SRC_REGION])
        pages = paged(self.memory, DST, self.order.dst_blocks)
        return bytes_read_by(bind_copies(rows, program.group_pairs, spans, pages, tokens))

    def finish(self) -> int:
        """Copy out of staging, multiply and zero; return the launches for what was in spans."""
        program = self.program
        for part in self.staged.copies(self.memory):
            self.arena.copy(part.bind())
        launches = 0
        if self.staged.spans.page_count.any():
            launches = bool(len(program.rows(SCATTER_SPANS)))
            if len(program.rows(PROJECT_SPANS)):
                self.arena.project(self.staged.projections(self.memory))
                launches += 1
        for part in cleared(*self._cleared):
            self.arena.zero(part.bind())
        return launches


def transfer(
    source: Engine,
    destination: Engine,
    tokens: TokenRange,
    strategy: Strategy = Strategy.AUTO,
    plan: Plan | None = None,
) -> Traffic:
    """Plan, compile, bind and execute."""
    plan = plan or make_plan(source.layout, destination.layout)
    traffic = Traffic()
    for program in compile_programs(plan, served(plan, strategy)):
        reading = Reading(program, source, destination, tokens)
        for given in reading.order.sources:
            ranks = given.src_rank, program.dst_rank
            for form, read in reading.reads(given):
                source.arena.read(read.descriptors)
                size_bytes = int(read.descriptors.length_bytes.sum())
                traffic.wire_bytes += size_bytes
                traffic.span_bytes[ranks] += size_bytes * (form == READ_SPANS)
                traffic.read_bytes[program.dst_rank] += size_bytes * (form == READ_PAGES)
                traffic.reads += len(read.descriptors.length_bytes)
            traffic.launches += 2 * bool(given.staged_bytes)
        traffic.read_bytes[program.dst_rank] += reading.gathered_bytes + reading.extracted_bytes()
        traffic.launches += reading.finish()
    return traffic


def served(plan: Plan, strategy: Strategy) -> Strategy:
    """Return the strategy, or ``pack`` where interleave would refuse for want of a snapshot."""
    if strategy is Strategy.INTERLEAVE and all(move.per_token for move in plan.moves):
        return Strategy.PACK
    return strategy
