"""What of one order arrives in staging first: packed runs and spans of pages, and where it goes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from restow.agents.binding import RegionTable, bind_scatter, staged_bytes
from restow.agents.chunks import bind_restore
from restow.agents.errors import OrderInvalidError
from restow.agents.lane import Read
from restow.agents.memory import Place
from restow.agents.orders import ExecuteOrder, Peer, Source
from restow.agents.pieces import Copies, Descriptors
from restow.agents.projecting import bind_projections
from restow.agents.spans import bind_extract, bind_spans, staged_spans
from restow.agents.staging import ALIGN_BYTES
from restow.broker.layout.rows import Int64s
from restow.broker.planner.interleave import chunk_bytes
from restow.broker.planner.program import Column, Program, SpanColumn
from restow.kernels import KeptRuns


class Arrivals:
    """One run of staging: first what each source gathered, then the spans."""

    def __init__(self, program: Program, order: ExecuteOrder) -> None:
        """Lay the run out, at address 0 for now."""
        self._program, self._order = program, order
        ranks = program.staging_ranks
        self._packed, self._restored = (
            {rank: rows[rows[:, Column.SRC_RANK] == rank] for rank in ranks}
            for rows in (program.packed, program.restored)
        )
        self._chunks = {rank: chunk_bytes(rows) for rank, rows in self._restored.items()}
        self._lengths = {
            rank: self._chunks[rank] + staged_bytes(rows, program.group_pairs, order.tokens)
            for rank, rows in self._packed.items()
        }
        self._begins: dict[int, int] = {}
        length = 0
        for rank, size in self._lengths.items():
            self._begins[rank] = length
            length += _aligned(size)
        self._spans, size = staged_spans(program.spans, program.group_pairs, order.tokens, length)
        self.length_bytes = length + size

    def put_at(self, address: int) -> None:
        """Say where the run is."""
        self._begins = {rank: begin + address for rank, begin in self._begins.items()}
        spans = self._spans
        base = spans.base_address + address
        self._spans = RegionTable(base, spans.page_stride_bytes, spans.page_count)

    def reads(self, source: Source, peer: Peer, place: Place) -> Iterator[Read]:
        """What is read from one source into the run, which is at ``place``."""
        length = self._lengths.get(source.src_rank, 0)
        if length:
            yield _staged_read(source, peer, self._begins[source.src_rank], length, place)
        spans = self._program.spans
        mine = spans[:, SpanColumn.SRC_RANK] == source.src_rank
        if not mine.any():
            return
        for src, at in peer.regions_at.items():
            chosen = mine.copy()
            chosen[mine] = at[spans[mine, SpanColumn.SRC_REGION]]
            descriptors = bind_spans(
                spans,
                chosen,
                self._program.group_pairs,
                peer.regions,
                self._spans,
                self._order.src_blocks,
                self._order.tokens,
            )
            if len(descriptors.length_bytes):
                yield Read(peer.agent_name, descriptors, src, place)

    def copies(self, memory: RegionTable, extraction: KeptRuns) -> Iterator[Copies]:
        """What is copied from the run to own pages; ``extraction`` is kept for the program."""
        order, pairs = self._order, self._program.group_pairs
        for rank, begin in self._begins.items():
            rows = self._restored[rank]
            if len(rows):
                yield bind_restore(rows, pairs, memory, order.dst_blocks, begin)
            rows, begin = self._packed[rank], begin + self._chunks[rank]
            if len(rows):
                yield bind_scatter(rows, pairs, memory, order.dst_blocks, order.tokens, begin)
        rows = self._program.extracted
        if len(rows):
            copies = bind_extract(rows, pairs, self._spans, memory, order.dst_blocks, order.tokens)
            yield replace(copies, kept=extraction)

    def projections(self, memory: RegionTable) -> Int64s:
        """The products of inputs in the run with weights in own memory."""
        order, program = self._order, self._program
        return bind_projections(
            program.projected,
            program.group_pairs,
            self._spans,
            memory,
            order.dst_blocks,
            order.tokens,
        )


def joined_reads(reads: Sequence[Read]) -> list[Read]:
    """One read for all pieces from one place of a peer to one place."""
    found: dict[tuple[str, Place, Place], list[Descriptors]] = {}
    for read in reads:
        found.setdefault((read.peer, read.src, read.dst), []).append(read.descriptors)
    return [
        Read(peer, parts[0] if len(parts) == 1 else Descriptors.joined(parts), src, dst)
        for (peer, src, dst), parts in found.items()
    ]


def _staged_read(source: Source, peer: Peer, address: int, length: int, place: Place) -> Read:
    if source.staged_bytes != length or source.staged_address < 1:
        raise OrderInvalidError(
            f"rank {source.src_rank} staged {source.staged_bytes} bytes, but the program packs "
            f"{length}",
            rank=source.src_rank,
        )
    one = (np.array([value], np.int64) for value in (source.staged_address, address, length))
    return Read(peer.agent_name, Descriptors(*one), peer.staging_place, place)


def _aligned(length_bytes: int) -> int:
    return -(-length_bytes // ALIGN_BYTES) * ALIGN_BYTES
