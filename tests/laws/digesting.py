"""One handoff as far as its READs, by the product's own binding, and what both sides hash of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from laws.checks import engines_of
from laws.executor import Arena, Int64s
from laws.strategies import Case
from laws.transfers import RankTransfer, served
from laws.world import Engine
from restow.agents.binding.extents import Extents, one_extent, source_extents
from restow.agents.execute.staged_reads import arrived_extents, joined_reads
from restow.agents.reading.lane import Read
from restow.broker.planner import Program, Strategy, compile_programs, make_plan
from restow.broker.rpc import wire_program


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
    message = wire_program.program_to_proto(program, src_rank, hashed=True)
    part = wire_program.program_from_proto(message)
    there = RankTransfer(program, source, destination, case.tokens)
    given, _ = there.gather(src_rank, part)
    run = one_extent(given.staged_address, given.staged_bytes)
    memory = source.regions(src_rank)
    hashed = source_extents(part, src_rank, memory, source.blocks, case.tokens, run)
    before = content(arena, hashed)
    reads = joined_reads(list(there.reads(given)))
    for read in reads:
        arena.read(read.descriptors)
    found = arrived_extents(program, src_rank, there.order, there.staged, there.own)
    return Hashed(reads, hashed, before, found, content(arena, found))


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
