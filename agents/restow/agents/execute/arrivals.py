"""What of one order arrives in staging first: packed runs and spans of pages, and where it goes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from restow.agents.binding.copies import Extraction, bind_copies
from restow.agents.binding.extents import Extents, one_extent, staged_span_extents
from restow.agents.binding.operands import DST, SRC, by_place, in_order, paged
from restow.agents.binding.pages import RegionTable
from restow.agents.binding.pieces import Copies, Descriptors
from restow.agents.binding.reads import SpanReads
from restow.agents.binding.staging import StagedSpans, staged_bytes
from restow.agents.copying.prepared_copies import PreparedCopies
from restow.agents.copying.projecting import bind_projections
from restow.agents.errors import OrderInvalidError
from restow.agents.execute.turning import Turning
from restow.agents.link.orders import ExecuteOrder, Peer, Source
from restow.agents.memory.regions import MemoryPlace, is_memory
from restow.agents.memory.staging_pool import ALIGN_BYTES
from restow.agents.reading.transport import Read
from restow.broker.layout.rows import Int64s
from restow.broker.planner.program import (
    GATHER_IN_ORDER,
    PROJECT_SPANS,
    READ_SPANS,
    SCATTER_PLACED,
    Program,
)
from restow.broker.planner.program.chunk import chunk_bytes


@dataclass(frozen=True, slots=True)
class ArrivingRows:
    """The rows of one program that arrive in staging first; keep it for many handoffs.

    By source rank: rows that it packs, those that it interleaves, and the bytes of the latter.
    """

    program: Program
    packed: Mapping[int, Int64s]
    restored: Mapping[int, Int64s]
    chunks: Mapping[int, int]
    spans: StagedSpans
    turning: Turning

    @classmethod
    def of(cls, program: Program, extraction: Extraction) -> ArrivingRows:
        """Those of ``program``, whose extracted rows are ``extraction``."""
        packed, restored = (
            {rank: program.rows(form, rank) for rank in program.staging_ranks}
            for form in (GATHER_IN_ORDER, SCATTER_PLACED)
        )
        chunks = {rank: chunk_bytes(rows) for rank, rows in restored.items()}
        spans = StagedSpans.of(program.rows(READ_SPANS), program.group_pairs)
        return cls(program, packed, restored, chunks, spans, Turning(extraction, spans))


class Arrivals:
    """One run of staging: first what each source gathered, then the spans."""

    def __init__(self, rows: ArrivingRows, order: ExecuteOrder) -> None:
        """Lay the run out, at address 0 for now."""
        self._rows, self._order = rows, order
        pairs = rows.program.group_pairs
        self._lengths = {
            rank: rows.chunks[rank] + staged_bytes(packed, pairs, order.tokens)
            for rank, packed in rows.packed.items()
        }
        self._begins: dict[int, int] = {}
        length = 0
        for rank, size in self._lengths.items():
            self._begins[rank] = length
            length += _aligned(size)
        self._spans, size = rows.spans.at(order.tokens, length)
        self.length_bytes = length + size

    def put_at(self, address: int) -> None:
        """Say where the run is."""
        self._begins = {rank: begin + address for rank, begin in self._begins.items()}
        spans = self._spans
        base = spans.base_address + address
        self._spans = RegionTable(base, spans.page_stride_bytes, spans.page_count)

    def reads(
        self,
        source: Source,
        peer: Peer,
        spans: Iterable[tuple[MemoryPlace, SpanReads]],
        place: MemoryPlace,
    ) -> Iterator[Read]:
        """What is read from one source, its ``spans`` too, into the run, which is at ``place``."""
        length = self._lengths.get(source.src_rank, 0)
        if length:
            yield _staged_read(source, peer, self._begins[source.src_rank], length, place)
        for src, laid in spans:
            descriptors = laid.bind(self._spans, self._order.src_blocks, self._order.tokens)
            if len(descriptors.length_bytes):
                yield Read(peer.agent_name, descriptors, src, place)

    def extents(self, src_rank: int) -> list[Extents]:
        """What was read from one source into the run, in the order in which it is hashed."""
        begin, length = self._begins.get(src_rank, 0), self._lengths.get(src_rank, 0)
        program, tokens = self._rows.program, self._order.tokens
        spans = staged_span_extents(program, src_rank, self._spans, tokens)
        return [one_extent(begin, length), *spans]

    def copies(
        self, memory: RegionTable, device: torch.device
    ) -> Iterator[Copies | PreparedCopies]:
        """What is copied from the run to own pages when all was read, all on ``device``."""
        order = self._order
        for rank in self._begins:
            yield from self._staged_copies(rank, memory)
        turning = self._rows.turning
        extracted = turning.bind(self._spans, order.dst_blocks, order.tokens, device)
        if len(extracted):
            yield extracted

    def _staged_copies(self, rank: int, memory: RegionTable) -> Iterator[Copies]:
        """What is copied from what one source gathered."""
        pairs, tokens, begin = (
            self._rows.program.group_pairs,
            self._order.tokens,
            self._begins[rank],
        )
        pages = paged(memory, DST, self._order.dst_blocks)
        rows = self._rows.restored[rank]
        if len(rows):
            yield bind_copies(rows, pairs, by_place(begin, SRC), pages, tokens)
        rows, begin = self._rows.packed[rank], begin + self._rows.chunks[rank]
        if len(rows):
            yield bind_copies(rows, pairs, in_order(rows, pairs, tokens, begin), pages, tokens)

    def projections(self, memory: RegionTable) -> Int64s:
        """The products of inputs in the run with weights in own memory."""
        order, program = self._order, self._rows.program
        return bind_projections(
            program.rows(PROJECT_SPANS),
            program.group_pairs,
            self._spans,
            memory,
            order.dst_blocks,
            order.tokens,
        )


def joined_reads(reads: Sequence[Read]) -> list[Read]:
    """One read for all pieces from one place of a peer to one place."""
    found: dict[tuple[str, MemoryPlace, MemoryPlace], list[Descriptors]] = {}
    for read in reads:
        found.setdefault((read.peer, read.src, read.dst), []).append(read.descriptors)
    return [
        Read(peer, Descriptors.joined(parts), src, dst) for (peer, src, dst), parts in found.items()
    ]


def _staged_read(source: Source, peer: Peer, address: int, length: int, place: MemoryPlace) -> Read:
    _check_staged(source, length)
    one = (np.array([value], np.int64) for value in (source.staged_address, address, length))
    return Read(peer.agent_name, Descriptors(*one), peer.staging_place, place)


def _check_staged(source: Source, length: int) -> None:
    if source.staged_bytes != length or not is_memory(source.staged_address, length):
        raise OrderInvalidError(
            f"rank {source.src_rank} staged {source.staged_bytes} bytes at address "
            f"{source.staged_address}, but the program packs {length}",
            rank=source.src_rank,
        )


def _aligned(length_bytes: int) -> int:
    return -(-length_bytes // ALIGN_BYTES) * ALIGN_BYTES
