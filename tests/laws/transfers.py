"""A transfer between two engines: the product binds it, and the reference executor moves bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from laws.executor import bytes_read_by
from laws.world import Engine
from restow.agents.binding.operands import SRC, paged
from restow.agents.binding.pages import TokenRange
from restow.agents.execute.gathering import GatheredRun
from restow.agents.execute.orders import ExecuteOrder, Peer, Source
from restow.agents.execute.staged_reads import KeptReads, StagedReads, bind_zeroes
from restow.agents.memory.regions import HOST
from restow.agents.reading.lane import Read
from restow.broker.planner import Plan, Program, Strategy, compile_programs, make_plan
from restow.broker.planner.program import CLEAR_PAGES, PROJECT_SPANS, SCATTER_SPANS

GUARD_BYTES = 16


@dataclass(slots=True)
class Traffic:
    """What a transfer did."""

    read_bytes: Counter[int] = field(default_factory=Counter)
    """Bytes of state that each rank of D took out of source pages."""
    span_bytes: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Bytes read as spans of pages, by source and destination rank."""
    wire_bytes: int = 0
    reads: int = 0
    launches: int = 0


class RankTransfer:
    """What one rank of D reads by its program, as `Executor` reads it."""

    def __init__(
        self, program: Program, source: Engine, destination: Engine, tokens: TokenRange
    ) -> None:
        self.program, self.tokens = program, tokens
        self.source, self.arena = source, source.arena
        self.own = destination.regions(program.dst_rank)
        blocks = source.blocks, destination.blocks
        self.order = ExecuteOrder(1, program.program_id, *blocks, tokens, (), 1.0, True)
        self.staged = StagedReads(program, self.order)
        self._begin = self.arena.allocate(self.staged.length_bytes, GUARD_BYTES)
        self.staged.put_at(self.arena.address(self._begin))
        self._kept = KeptReads(self.own, HOST)

    def gather(self, src_rank: int, part: Program) -> tuple[Source, int]:
        """Have a rank of P gather by its part of the program; return its run and bytes read."""
        run = GatheredRun.at_source(part, src_rank, self.tokens)
        address = self.arena.address(self.arena.allocate(run.length_bytes, GUARD_BYTES))
        pages = paged(self.source.regions(src_rank), SRC, self.source.blocks)
        read_bytes = 0
        for copies in run.gather(pages, address):
            self.arena.copy(copies)
            read_bytes += bytes_read_by(copies)
        return Source(src_rank, "P", address, run.length_bytes), read_bytes

    def reads(self, given: Source) -> Iterator[Read]:
        """Yield what is read of a source: direct pieces, spans, and its run."""
        peer = Peer("P", given.src_rank, b"", self.source.regions(given.src_rank), HOST)
        laid = self._kept.of(self.program, given.src_rank, peer)
        yield from laid.bind(self.order, self.staged.spans)
        yield from self.staged.reads(given, peer, HOST)

    def run(self, traffic: Traffic) -> None:
        """Do it all, and count it."""
        dst_rank, begin = self.program.dst_rank, self.arena.address(self._begin)
        stop = begin + self.staged.length_bytes
        spans_begin = min(self.staged.spans.base_address.tolist(), default=stop)
        for src_rank in self.program.src_ranks:
            given, gathered_bytes = self.gather(src_rank, self.program)
            traffic.read_bytes[dst_rank] += gathered_bytes
            traffic.launches += 2 * bool(given.staged_bytes)
            for read in self.reads(given):
                pieces = read.descriptors
                self.arena.read(pieces)
                traffic.wire_bytes += pieces.size_bytes
                traffic.reads += len(pieces.length_bytes)
                at = int(pieces.dst_address[0]) if len(pieces.dst_address) else begin
                if spans_begin <= at < stop:
                    traffic.span_bytes[src_rank, dst_rank] += pieces.size_bytes
                elif not begin <= at < stop:
                    traffic.read_bytes[dst_rank] += pieces.size_bytes
        for copies in self.staged.copies(self.own):
            self.arena.copy(copies)
        spans = slice(spans_begin - self.arena.base, stop - self.arena.base)
        traffic.read_bytes[dst_rank] += int(self.arena.reads[spans].sum())
        traffic.launches += bool(len(self.program.rows(SCATTER_SPANS)))
        if len(self.program.rows(PROJECT_SPANS)):
            self.arena.project(self.staged.projections(self.own))
            traffic.launches += 1
        cleared = self.program.rows(CLEAR_PAGES)
        self.arena.zero(bind_zeroes(cleared, self.program, self.order, self.own))


def transfer(
    source: Engine,
    destination: Engine,
    tokens: TokenRange,
    strategy: Strategy = Strategy.AUTO,
    plan: Plan | None = None,
) -> Traffic:
    """Plan, compile, bind and execute with the reference executor."""
    plan = plan or make_plan(source.layout, destination.layout)
    traffic = Traffic()
    for program in compile_programs(plan, served(plan, strategy)):
        RankTransfer(program, source, destination, tokens).run(traffic)
    return traffic


def served(plan: Plan, strategy: Strategy) -> Strategy:
    """Return the strategy, or ``pack`` where interleave would refuse for want of a snapshot."""
    if strategy is Strategy.INTERLEAVE and all(move.per_token for move in plan.moves):
        return Strategy.PACK
    return strategy
