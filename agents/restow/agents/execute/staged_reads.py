"""What of one order is read into staging first, and where it goes from there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from restow.agents.binding.copies import Copies, bind_copies
from restow.agents.binding.descriptors import Descriptors
from restow.agents.binding.extents import Extents, one_extent, staged_span_extents
from restow.agents.binding.operands import DST, in_spans, paged
from restow.agents.binding.pages import RegionTable
from restow.agents.binding.staging import staged_spans
from restow.agents.copying.projecting import bind_projections
from restow.agents.errors import OrderInvalidError
from restow.agents.execute.gathered_run import GatheredRun
from restow.agents.link.orders import ExecuteOrder, Peer, Source
from restow.agents.memory.regions import MemoryPlace, is_memory
from restow.agents.reading.transport import Read
from restow.broker.layout.rows import Int64s
from restow.broker.planner.program import PROJECT_SPANS, READ_SPANS, SCATTER_SPANS, Program
from restow.broker.planner.program.chunk import aligned


class StagedReads:
    """One stretch of staging: first the run that each source gathered, then the spans."""

    def __init__(self, program: Program, order: ExecuteOrder) -> None:
        """Lay it out, at address 0 for now."""
        self._program, self._order = program, order
        self._runs: dict[int, GatheredRun] = {}
        self._begins: dict[int, int] = {}
        length = 0
        for rank in program.staging_ranks:
            run = self._runs[rank] = GatheredRun.at_destination(program, rank, order.tokens)
            self._begins[rank] = length
            length += aligned(run.length_bytes)
        pairs = program.group_pairs
        self.spans, size = staged_spans(program.rows(READ_SPANS), pairs, order.tokens, length)
        self.length_bytes = length + size

    def put_at(self, address: int) -> None:
        """Say where the stretch is."""
        self._begins = {rank: begin + address for rank, begin in self._begins.items()}
        spans = self.spans
        base = spans.base_address + address
        self.spans = RegionTable(base, spans.page_stride_bytes, spans.page_count)

    def reads(self, source: Source, peer: Peer, place: MemoryPlace) -> Iterator[Read]:
        """What is read of the run of one source into the stretch, whose memory is at ``place``.

        Raises `OrderInvalidError` if it is not as long as the program says.
        """
        run = self._runs.get(source.src_rank)
        if run is None or not run.length_bytes:
            return
        _check_staged(source, run.length_bytes)
        numbers = source.staged_address, self._begins[source.src_rank], run.length_bytes
        piece = Descriptors(*(np.array([number], np.int64) for number in numbers))
        yield Read(peer.agent_name, piece, peer.place, place)

    def extents(self, src_rank: int) -> list[Extents]:
        """What was read from one source, in the order in which it is hashed."""
        spans = staged_span_extents(self._program, src_rank, self.spans, self._order.tokens)
        run = self._runs.get(src_rank)
        gathered = [one_extent(self._begins[src_rank], run.length_bytes)] if run else []
        return [*gathered, *spans]

    def copies(self, memory: RegionTable) -> list[Copies]:
        """What is copied to own pages when all was read.

        Raises `PageCountError` and `PageRangeError`.
        """
        if not self.length_bytes:
            return []
        program, order = self._program, self._order
        pages = paged(memory, DST, order.dst_blocks)
        found = [
            copies
            for rank, run in self._runs.items()
            for copies in run.scatter(pages, self._begins[rank])
        ]
        rows, spans = program.rows(SCATTER_SPANS), in_spans(self.spans)
        found.append(bind_copies(rows, program.group_pairs, spans, pages, order.tokens))
        return [copies for copies in found if len(copies)]

    def projections(self, memory: RegionTable) -> Int64s:
        """The products of inputs in spans with weights in own memory."""
        return bind_projections(
            self._program.rows(PROJECT_SPANS),
            self._program.group_pairs,
            self.spans,
            memory,
            self._order.dst_blocks,
            self._order.tokens,
        )


def joined_reads(reads: Sequence[Read]) -> list[Read]:
    """One read for all pieces from one place of a peer to one place; none without pieces."""
    found: dict[tuple[str, MemoryPlace, MemoryPlace], list[Descriptors]] = {}
    for read in reads:
        if len(read.descriptors.length_bytes):
            found.setdefault((read.peer, read.src, read.dst), []).append(read.descriptors)
    return [
        Read(peer, Descriptors.joined(parts), src, dst) for (peer, src, dst), parts in found.items()
    ]


def _check_staged(source: Source, length: int) -> None:
    if source.staged_bytes != length or not is_memory(source.staged_address, length):
        raise OrderInvalidError(
            f"rank {source.src_rank} staged {source.staged_bytes} bytes at address "
            f"{source.staged_address}, but the program packs {length}",
            rank=source.src_rank,
        )
