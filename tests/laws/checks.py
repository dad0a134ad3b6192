"""The laws themselves, as functions that raise AssertionError for a case that breaks one."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from laws.executor import Arena
from laws.strategies import Case
from laws.transfers import Reading, Traffic, served, transfer
from laws.world import Engine, held_tokens
from restow.agents.binding.extents import Extents, one_extent, source_extents
from restow.agents.binding.pages import TokenRange
from restow.agents.execute.order_reads import arrived_extents, joined_reads
from restow.agents.execute.orders import Source
from restow.agents.reading.lane import Read
from restow.broker.layout import Box, Layout, Region, TokenClass, digest
from restow.broker.layout.json_form import layout_from_json, layout_to_json
from restow.broker.layout.span import overlap, volume
from restow.broker.planner import Move, Plan, Strategy, compile_programs, make_plan
from restow.broker.rpc import wire_program


def engines_of(case: Case, arena: Arena) -> list[Engine]:
    """Return an engine for each layout; the first holds the whole prompt, the others nothing."""
    rng, stop = case.rng, case.tokens.stop
    engines = [Engine(arena, layout, stop, rng, case.guard_bytes) for layout in case.layouts]
    engines[0].keeps_inputs = True
    for engine in engines:
        engine.furnish(arena.data, case.state)
    engines[0].write(arena.data, case.state, TokenRange(0, stop))
    return engines


def check_cover(case: Case, strategy: Strategy) -> Traffic:
    """Check that the destination holds its slices and nothing else, and the source is unchanged."""
    arena = Arena()
    source, destination = engines_of(case, arena)
    traffic = transfer(source, destination, case.tokens, strategy)
    destination.check(case.arriving, case.tokens, written=True)
    source.check(case.state, TokenRange(0, case.tokens.stop), written=False)
    return traffic


def check_round_trip(case: Case, there: Strategy, back: Strategy) -> None:
    """Check that P to D to P gives the first bytes back, in other pages."""
    first, second = case.layouts
    arena = Arena()
    source, middle, returned = engines_of(replace(case, layouts=(first, second, first)), arena)
    transfer(source, middle, TokenRange(0, case.tokens.stop), there)
    transfer(middle, returned, case.tokens, back)
    returned.check(case.state, case.tokens, written=True)


def check_composition(case: Case, strategies: tuple[Strategy, Strategy, Strategy]) -> None:
    """Check that P to Q to D gives the bytes of P to D, poison included."""
    via = _arrived(case, strategies[:2], via=True)
    direct = _arrived(case, strategies[2:], via=False)
    assert via == direct, "P to Q to D differs from P to D"


def _arrived(case: Case, strategies: tuple[Strategy, ...], via: bool) -> bytes:
    arena = Arena()
    source, middle, destination = engines_of(case, arena)
    if via:
        transfer(source, middle, TokenRange(0, case.tokens.stop), strategies[0])
        source = middle
    transfer(source, destination, case.tokens, strategies[-1])
    return arena.data[destination.start : destination.stop].tobytes()


def check_minimality(case: Case, strategy: Strategy) -> None:
    """Check that what is needed is read once, and that replicas share the load."""
    source, destination = case.layouts
    plan = make_plan(source, destination)
    stop = case.tokens.stop
    whole, counts = needed_bytes(destination, TokenRange(0, stop)), plan.entries(stop)
    assert plan.bytes_at(stop) == sum(whole.values()), "the plan reads more than is needed"
    for rank, size in whole.items():
        mine = [m for m in plan.moves if m.dst_rank == rank]
        told = sum(move.bytes * move.entries(counts[move.field], stop) for move in mine)
        assert told == size, f"rank {rank} reads {told} bytes and needs {size}"
    needed = needed_bytes(destination, case.tokens)
    traffic = check_cover(case, strategy)
    read = {rank: traffic.read_bytes[rank] for rank in needed}
    assert read == needed
    check_disjoint(plan)
    check_shared(plan)
    page_bytes = bytes_of_pages(source, destination, case.tokens)
    for ranks, size in traffic.span_bytes.items():
        assert size <= page_bytes[ranks], "spans of pages without a needed byte are read"


def bytes_of_pages(
    source: Layout, destination: Layout, tokens: TokenRange
) -> dict[tuple[int, int], int]:
    """Return the length of all pages of a rank that hold something another rank lacks.

    The lengths are given by source and destination rank. Fields of one region that have windows of
    their own are read each for itself, and so are fields that the other side keeps by other lists,
    or of which it keeps other tokens.
    """
    begins, found = first_tokens(destination, tokens), {}
    windows = {field.name: field.window_tokens for field in source.model.fields}
    for src, dst in product(source.ranks, destination.ranks):
        wanted: dict[str, list[Region]] = defaultdict(list)
        for shard in dst.shards:
            wanted[shard.field].append(dst.region(shard.region))
        read = {
            (shard.region, begins[shard.field], windows[shard.field], one.group, one.tokens): one
            for shard in src.shards
            for one in wanted[shard.field]
        }
        total = 0
        for (name, first, *_), one in read.items():
            region = src.region(name)
            total += _pages_of(region, one, first, tokens.stop) * region.page_stride_bytes
        found[src.rank, dst.rank] = total
    return found


def _pages_of(src: Region, dst: Region, first: int, stop: int) -> int:
    """Return how many pages have tokens from ``first`` on, if the other region lacks any."""
    if src.page_tokens is None:
        return 1
    before, held = len(held_tokens(src, 0, first)), len(held_tokens(src, 0, stop))
    if not set(held_tokens(src, first, stop)) & set(held_tokens(dst, first, stop)):
        return 0
    return -(-held // src.page_tokens) - before // src.page_tokens


def needed_bytes(layout: Layout, tokens: TokenRange) -> dict[int, int]:
    """Return how many bytes each rank lacks."""
    begins = first_tokens(layout, tokens)
    return {
        rank.rank: sum(
            volume(shard.box)
            * shard.dtype.itemsize_bytes
            * _entries(rank.region(shard.region), begins[shard.field], tokens)
            for shard in rank.shards
        )
        for rank in layout.ranks
    }


def first_tokens(layout: Layout, tokens: TokenRange) -> dict[str, int]:
    """Return the first token needed of each field: of its window, or of a whole block."""
    blocks = {
        shard.field: region.block_tokens
        for rank in layout.ranks
        for shard in rank.shards
        if (region := rank.region(shard.region)).whole_blocks
    }
    found = {}
    for field in layout.model.fields:
        first = max(tokens.stop - (field.window_tokens or tokens.stop), 0)
        first = first // blocks.get(field.name, 1) * blocks.get(field.name, 1)
        found[field.name] = max(first, tokens.start)
    return found


def _entries(region: Region, first: int, tokens: TokenRange) -> int:
    """Return how many entries a region needs of a field that begins at token ``first``."""
    return 1 if region.page_tokens is None else len(held_tokens(region, first, tokens.stop))


def check_disjoint(plan: Plan) -> None:
    """Check that no rank is told twice to read an element of a token."""
    by_field: dict[tuple[int, str], list[Move]] = defaultdict(list)
    for move in plan.moves:
        by_field[move.dst_rank, move.field].append(move)
    for moves in by_field.values():
        for index, one in enumerate(moves):
            assert not any(
                overlap(one.box, other.box) and _same_token(one, other) for other in moves[:index]
            )


def _same_token(one: Move, other: Move) -> bool:
    held = (one.src.tokens, one.dst.tokens, other.src.tokens, other.dst.tokens)
    tokens = np.arange(math.lcm(*(part.period_tokens for part in held)))
    return bool(
        np.logical_and.reduce([np.isin(tokens, p.first_tokens(tokens)) for p in held]).any()
    )


def check_shared(plan: Plan) -> None:
    """Check that of r replicas with n readers none serves more than n / r, rounded up."""
    replicas: dict[tuple[str, Box, TokenClass], set[int]] = defaultdict(set)
    for rank in plan.source.ranks:
        for shard in rank.shards:
            replicas[shard.field, shard.box, rank.region(shard.region).tokens].add(rank.rank)
    for (name, box, tokens), holders in replicas.items():
        mine = [m for m in plan.moves if m.field == name and overlap(m.box, box) is not None]
        mine = [move for move in mine if move.src.tokens == tokens]
        readers = {move.dst_rank for move in mine}
        for holder in holders:
            served = {move.dst_rank for move in mine if move.src_rank == holder}
            fair = -(-len(readers) // len(holders))
            assert len(served) <= fair, f"rank {holder} serves {len(served)} of {len(readers)}"


def check_determinism(case: Case, strategy: Strategy) -> None:
    """Check that equal layouts give equal digests, plans and programs, and others do not."""
    source, destination = case.layouts
    again = tuple(layout_from_json(layout_to_json(layout)) for layout in case.layouts)
    assert again == case.layouts
    assert [digest(layout) for layout in again] == [digest(layout) for layout in case.layouts]
    one, two = make_plan(source, destination), make_plan(*again)
    assert one == two
    for left, right in zip(
        compile_programs(one, served(one, strategy)),
        compile_programs(two, served(one, strategy)),
        strict=True,
    ):
        assert left.program_id == right.program_id
        assert left.group_pairs == right.group_pairs
        assert [step.form for step in left.steps] == [step.form for step in right.steps]
        for mine, other in zip(left.steps, right.steps, strict=True):
            assert np.array_equal(mine.rows, other.rows)
    if source != destination:
        assert digest(source) != digest(destination)
    assert digest(_nudged(source)) != digest(source)


def _nudged(layout: Layout) -> Layout:
    """Return the layout with one number changed."""
    rank = next(rank for rank in layout.ranks if rank.shards)
    shard = replace(rank.shards[0], offset_bytes=rank.shards[0].offset_bytes + 1)
    other = replace(rank, shards=(shard, *rank.shards[1:]))
    return replace(layout, ranks=tuple(other if r is rank else r for r in layout.ranks))


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
            hashed = arena.places(extents.address, extents.length_bytes)
            read = [
                arena.places(getattr(each.descriptors, side), each.descriptors.length_bytes)
                for each in one.reads
            ]
            # P's bytes may be read twice, as spans of fields that have windows of their own.
            wanted = np.sort(np.concatenate([np.empty(0, np.int64), *read]))
            assert np.array_equal(np.sort(hashed), wanted), f"not what is read, on {side}"
        arrived = arena.places(one.destination.address, one.destination.length_bytes)
        assert len(np.unique(arrived)) == len(arrived), "a byte is hashed twice"


def handed_over(case: Case, strategy: Strategy, arena: Arena) -> Iterator[Hashed]:
    """Yield the hashed bytes of every pair of ranks."""
    source, destination = engines_of(case, arena)
    plan = make_plan(source.layout, destination.layout)
    for program in compile_programs(plan, served(plan, strategy)):
        reading = Reading(program, source, destination, case.tokens)
        for given in reading.order.sources:
            yield _hashed(reading, given)


def _hashed(reading: Reading, given: Source) -> Hashed:
    """Read from one source; P knows only the part of the program that it is sent."""
    rank, order = given.src_rank, reading.order
    message = wire_program.program_to_proto(reading.program, rank, hashed=True)
    part = wire_program.program_from_proto(message)
    run = one_extent(given.staged_address, given.staged_bytes)
    memory = reading.peers[rank].regions
    hashed = source_extents(part, rank, memory, order.src_blocks, order.tokens, run)
    before = content(reading.arena, hashed)
    reads = joined_reads([read for _, read in reading.reads(given)])
    for read in reads:
        reading.arena.read(read.descriptors)
    found = arrived_extents(reading.program, rank, order, reading.staged, reading.memory)
    return Hashed(reads, hashed, before, found, content(reading.arena, found))


def content(arena: Arena, extents: Extents) -> bytes:
    """Return the bytes of the extents in order."""
    return arena.data[arena.places(extents.address, extents.length_bytes)].tobytes()
