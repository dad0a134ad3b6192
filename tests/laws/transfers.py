"""A transfer between two engines, executed by the reference executor, and what it moved."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from laws.executor import bytes_read_by
from laws.world import Engine
from restow.agents.binding.copies import bind_copies
from restow.agents.binding.operands import DST, SRC, by_place, in_order, in_spans, paged
from restow.agents.binding.pages import TokenRange, staged_bytes, staged_spans
from restow.agents.binding.reads import Descriptors, Reads, SpanReads
from restow.agents.copying import copier as copying
from restow.broker.layout import RankLayout
from restow.broker.planner import Plan, Program, Strategy, compile_programs, make_plan
from restow.broker.planner.program import (
    CLEAR_PAGES,
    GATHER_IN_ORDER,
    GATHER_PLACED,
    INTERLEAVED_TO,
    PROJECT_SPANS,
    READ_PAGES,
    READ_SPANS,
    SCATTER_PLACED,
    SCATTER_SPANS,
    Column,
    chunk_bytes,
)

ITEMS = np.array([0, 1, 1, 1, 1, 2, 2, 4, 1])
"""Bytes of an element by `DType` number."""


@dataclass(slots=True)
class Traffic:
    """What a transfer did."""

    read_bytes: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Bytes of state that (source rank, destination rank) took out of source pages."""
    wire_bytes: Counter[tuple[int, int]] = field(default_factory=Counter)
    span_bytes: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Of these, what was read as spans of pages."""
    reads: int = 0
    launches: int = 0


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
        rank = next(r for r in destination.layout.ranks if r.rank == program.dst_rank)
        for src_rank in program.src_ranks:
            src = next(r for r in source.layout.ranks if r.rank == src_rank)
            _read_direct(program, source, src, destination, rank, tokens, traffic)
            if src_rank in program.staging_ranks:
                _read_packed(program, source, src, destination, rank, tokens, traffic)
        _read_spans(program, source, destination, rank, tokens, traffic)
        rows, pairs = program.rows(CLEAR_PAGES), program.group_pairs
        pages = paged(destination.regions(rank), DST, destination.blocks)
        run = in_order(rows, pairs, tokens, 0)
        destination.arena.zero(bind_copies(rows, pairs, run, pages, tokens))
    return traffic


def served(plan: Plan, strategy: Strategy) -> Strategy:
    """Return the strategy, or ``pack`` where interleave would refuse for want of a snapshot."""
    if strategy is Strategy.INTERLEAVE and all(move.per_token for move in plan.moves):
        return Strategy.PACK
    return strategy


def _read_direct(
    program: Program,
    source: Engine,
    src: RankLayout,
    destination: Engine,
    dst: RankLayout,
    tokens: TokenRange,
    traffic: Traffic,
) -> None:
    rows = program.rows(READ_PAGES, src.rank)
    laid = Reads.of(rows, program.group_pairs, source.regions(src), destination.regions(dst))
    descriptors = laid.bind(source.blocks, destination.blocks, tokens)
    source.arena.read(descriptors)
    moved = int(descriptors.length_bytes.sum())
    traffic.read_bytes[src.rank, dst.rank] += moved
    traffic.wire_bytes[src.rank, dst.rank] += moved
    traffic.reads += len(descriptors.length_bytes)


def _read_packed(
    program: Program,
    source: Engine,
    src: RankLayout,
    destination: Engine,
    dst: RankLayout,
    tokens: TokenRange,
    traffic: Traffic,
) -> None:
    """Gather at the source, READ the whole run once, and scatter at the destination.

    The run begins with the chunk of what is interleaved.
    """
    arena, pairs = source.arena, program.group_pairs
    interleaved, packed, restored = (
        program.rows(form, src.rank) for form in (GATHER_PLACED, GATHER_IN_ORDER, SCATTER_PLACED)
    )
    chunk = chunk_bytes(interleaved, INTERLEAVED_TO)
    assert chunk == chunk_bytes(restored), "the two sides see chunks of other lengths"
    size = chunk + staged_bytes(packed, pairs, tokens)
    if size == 0:
        return
    there, here = (arena.address(arena.allocate(size, 16)) for _ in range(2))
    pages = paged(source.regions(src), SRC, source.blocks)
    packed_run = in_order(packed, pairs, tokens, there + chunk)
    gathers = (
        bind_copies(interleaved, pairs, pages, by_place(there, DST), tokens),
        bind_copies(packed, pairs, pages, packed_run, tokens),
    )
    for gather in gathers:
        arena.copy(gather)
        traffic.read_bytes[src.rank, dst.rank] += bytes_read_by(gather)
    run = (np.array([value], np.int64) for value in (there, here, size))
    arena.read(Descriptors(*run))
    pages = paged(destination.regions(dst), DST, destination.blocks)
    packed_run = in_order(packed, pairs, tokens, here + chunk)
    arena.copy(bind_copies(restored, pairs, by_place(here, SRC), pages, tokens))
    arena.copy(bind_copies(packed, pairs, packed_run, pages, tokens))
    traffic.wire_bytes[src.rank, dst.rank] += size
    traffic.reads += 1
    traffic.launches += 2


def _read_spans(
    program: Program,
    source: Engine,
    destination: Engine,
    dst: RankLayout,
    tokens: TokenRange,
    traffic: Traffic,
) -> None:
    """Read spans of pages as they are, then copy what is wanted out of them."""
    arena, pairs, table = source.arena, program.group_pairs, program.rows(READ_SPANS)
    _, size = staged_spans(table, pairs, tokens)
    if size == 0:
        return
    here = arena.address(arena.allocate(size, 16))
    staged, _ = staged_spans(table, pairs, tokens, here)
    for src in source.layout.ranks:
        mine = table[:, Column.SRC_RANK] == src.rank
        regions = source.regions(src)
        reads = SpanReads.of(table, mine, pairs, regions)
        descriptors = reads.bind(staged, source.blocks, tokens)
        arena.read(descriptors)
        read_bytes = int(descriptors.length_bytes.sum())
        traffic.wire_bytes[src.rank, dst.rank] += read_bytes
        traffic.span_bytes[src.rank, dst.rank] += read_bytes
        traffic.reads += len(descriptors.length_bytes)
        rows = program.rows(SCATTER_SPANS, src.rank)
        pages = paged(destination.regions(dst), DST, destination.blocks)
        copies = bind_copies(rows, pairs, in_spans(staged), pages, tokens)
        arena.copy(copies)
        traffic.read_bytes[src.rank, dst.rank] += bytes_read_by(copies)
    traffic.launches += bool(len(program.rows(SCATTER_SPANS)))
    if len(program.rows(PROJECT_SPANS)):
        memory, blocks = destination.regions(dst), destination.blocks
        rows = copying.bind_projections(
            program.rows(PROJECT_SPANS), pairs, staged, memory, blocks, tokens
        )
        arena.project(rows)
        traffic.launches += 1
