"""One handoff as far as its READs, by the product's own binding, and what both sides hash of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from laws.checks import engines_of
from laws.executor import Arena, Int64s
from laws.strategies import Case
from laws.transfers import served
from laws.world import Engine
from restow.agents.binding.extents import Extents, one_extent, source_extents
from restow.agents.binding.operands import SRC, paged
from restow.agents.binding.pages import RegionTable
from restow.agents.execute.gathering import GatheredRun
from restow.agents.execute.orders import ExecuteOrder, Peer, Source
from restow.agents.execute.staged_reads import KeptReads, StagedReads, arrived_extents, joined_reads
from restow.agents.memory.regions import HOST
from restow.agents.reading.lane import Read
from restow.broker.planner import Program, Strategy, compile_programs, make_plan
from restow.broker.rpc import wire_program

P_STAGING, D_STAGING = 16, 16


@dataclass(frozen=True)
class Hashed:
    """What D's rank read from a rank of P, and what each side hashes."""

    reads: Sequence[Read]
    source: Extents
    source_bytes: bytes
    destination: Extents
    destination_bytes: bytes


def check_digests(case: Case, strategy: Strategy) -> None:
    """Check that both sides hash all bytes that are read, nothing else, in the same order."""
    arena = Arena()
    for one in handed_over(case, strategy, arena):
        assert one.source_bytes == one.destination_bytes, "the sides hash differently"
        for extents, side in ((one.source, "src_address"), (one.destination, "dst_address")):
            hashed = places(arena, extents.address, extents.length_bytes)
            read = [
                places(arena, getattr(each.descriptors, side), each.descriptors.length_bytes)
                for each in one.reads
            ]
            # P's bytes may be read twice, as spans of fields that have windows of their own.
            wanted = np.sort(np.concatenate([np.empty(0, np.int64), *read]))
            assert np.array_equal(np.sort(hashed), wanted), f"not what is read, on {side}"
        arrived = places(arena, one.destination.address, one.destination.length_bytes)
        assert len(np.unique(arrived)) == len(arrived), "a byte is hashed twice"


def handed_over(case: Case, strategy: Strategy, arena: Arena) -> Iterator[Hashed]:
    """Yield the hashed bytes of every pair of ranks."""
    source, destination = engines_of(case, arena)
    plan = make_plan(source.layout, destination.layout)
    for program in compile_programs(plan, served(plan, strategy)):
        for src_rank in program.src_ranks:
            yield _read(program, src_rank, source, destination, case, arena)


def _read(
    program: Program, src_rank: int, source: Engine, destination: Engine, case: Case, arena: Arena
) -> Hashed:
    tokens = case.tokens
    memory = _memory(source, src_rank)
    message = wire_program.program_to_proto(program, src_rank, hashed=True)
    part = wire_program.program_from_proto(message)
    gathered = GatheredRun.at_source(part, src_rank, tokens)
    staged = arena.address(arena.allocate(gathered.length_bytes, P_STAGING))
    for copies in gathered.gather(paged(memory, SRC, source.blocks), staged):
        arena.copy(copies)
    run = one_extent(staged, gathered.length_bytes)
    hashed = source_extents(part, src_rank, memory, source.blocks, tokens, run)
    before = content(arena, hashed)

    own = _memory(destination, program.dst_rank)
    given = Source(src_rank, "p", staged if gathered.length_bytes else 0, gathered.length_bytes)
    execute = ExecuteOrder(
        1, program.program_id, source.blocks, destination.blocks, tokens, (given,), 1.0, True
    )
    peer = Peer("p", src_rank, b"", memory, HOST)
    there = StagedReads(program, execute)
    there.put_at(arena.address(arena.allocate(there.length_bytes, D_STAGING)))
    laid = KeptReads(own, HOST).of(program, src_rank, peer)
    reads = joined_reads([*laid.bind(execute, there.spans), *there.reads(given, peer, HOST)])
    for read in reads:
        arena.read(read.descriptors)
    found = arrived_extents(program, src_rank, execute, there, own)
    return Hashed(reads, hashed, before, found, content(arena, found))


def _memory(engine: Engine, rank: int) -> RegionTable:
    return engine.regions(next(one for one in engine.layout.ranks if one.rank == rank))


def content(arena: Arena, extents: Extents) -> bytes:
    """Return the bytes of the extents in order."""
    return arena.data[places(arena, extents.address, extents.length_bytes)].tobytes()


def places(arena: Arena, address: Int64s, length_bytes: Int64s) -> Int64s:
    """Return where each byte is in the arena."""
    ends = np.cumsum(length_bytes)
    total = int(ends[-1]) if len(ends) else 0
    begins = np.repeat(address - arena.base - (ends - length_bytes), length_bytes)
    found: Int64s = begins + np.arange(total)
    return found
