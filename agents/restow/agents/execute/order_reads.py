"""The reads of a program, prepared once for the memory of both ranks and bound to each order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from restow.agents.binding.copies import RowCopies
from restow.agents.binding.extents import Extents, direct_extents, one_extent, staged_span_extents
from restow.agents.binding.operands import DST, in_spans, paged
from restow.agents.binding.pages import RegionTable, staged_spans
from restow.agents.binding.reads import Descriptors, Reads, SpanReads
from restow.agents.copying.copier import (
    DIGEST_BYTES,
    Hasher,
    bind_projections,
    window_rows,
)
from restow.agents.execute.gathering import GatheredRun
from restow.agents.execute.orders import ExecuteOrder, Peer, Source
from restow.agents.memory.errors import DigestMismatchError, DigestMissingError, OrderInvalidError
from restow.agents.memory.regions import MemoryPlace, is_memory
from restow.agents.reading.lane import Read
from restow.broker.layout.rows import Int64s
from restow.broker.planner.program import (
    CLEAR_PAGES,
    PROJECT_SPANS,
    READ_PAGES,
    READ_SPANS,
    SCATTER_SPANS,
    Column,
    Operand,
    Program,
    aligned,
    no_rows,
)


@dataclass(frozen=True, slots=True)
class PeerReads:
    """Reads of a program from one peer: directly into pages, and as spans into staging."""

    peer: Peer
    place: MemoryPlace
    """Place of the rank's own pages and staging."""
    direct: Reads | None
    spans: SpanReads | None

    def bind(self, order: ExecuteOrder, staged: RegionTable) -> Iterator[Read]:
        """Yield the reads of one order; spans are read into the regions of ``staged``.

        Raises `PageCountError` and `PageRangeError`.
        """
        name, ends = self.peer.agent_name, (self.peer.place, self.place)
        if self.direct is not None:
            pieces = self.direct.bind(order.src_blocks, order.dst_blocks, order.tokens)
            yield Read(name, pieces, *ends)
        if self.spans is not None:
            yield Read(name, self.spans.bind(staged, order.src_blocks, order.tokens), *ends)


class KeptReads:
    """Keeps the part of binding that does not depend on an order."""

    def __init__(self, memory: RegionTable, place: MemoryPlace) -> None:
        """Bind reads into the pages of ``memory``, which is at ``place``."""
        self._memory, self._place = memory, place
        self._kept: dict[tuple[str, int, str], PeerReads] = {}
        """Reads by program, source rank and peer."""

    def of(self, program: Program, src_rank: int, peer: Peer) -> PeerReads:
        """Return the reads from ``src_rank``, whose agent is ``peer``."""
        key = (program.program_id, src_rank, peer.agent_name)
        kept = self._kept.get(key)
        if kept is None:
            rows, spans = program.rows(READ_PAGES, src_rank), program.rows(READ_SPANS)
            pairs, mine = program.group_pairs, spans[:, Column.SRC_RANK] == src_rank
            kept = self._kept[key] = PeerReads(
                peer,
                self._place,
                Reads.of(rows, pairs, peer.regions, self._memory) if len(rows) else None,
                SpanReads.of(spans, mine, pairs, peer.regions) if mine.any() else None,
            )
        return kept

    def forget_program(self, program_id: str) -> None:
        """Forget a program, whose id another program may have from now on. May be called again."""
        for key in [key for key in self._kept if key[0] == program_id]:
            del self._kept[key]

    def forget_peer(self, agent_name: str) -> None:
        """Forget a peer, whose memory may be elsewhere when it returns. May be called again."""
        for key in [key for key in self._kept if key[2] == agent_name]:
            del self._kept[key]

    def clear(self) -> None:
        """Forget all reads."""
        self._kept.clear()


def check_digests_are_there(order: ExecuteOrder) -> None:
    """Raise `DigestMissingError` if a source has no digest, before anything is read in vain."""
    for source in order.sources if order.hashed else ():
        if len(source.digest) != DIGEST_BYTES:
            raise DigestMissingError(
                f"the bytes read from rank {source.src_rank} are to be compared with a digest, "
                f"but the digest given has {len(source.digest)} bytes, not {DIGEST_BYTES}",
                rank=source.src_rank,
            )


async def compare(
    program: Program, order: ExecuteOrder, staged: StagedReads, memory: RegionTable, hasher: Hasher
) -> None:
    """Hash the bytes read from each source where they landed, and compare the digests.

    This must happen before anything is copied out of staging, because casts and transposition
    change bytes. Raises `DigestMismatchError`.
    """
    for source in order.sources:
        rank = source.src_rank
        extents = arrived_extents(program, rank, order, staged, memory)
        if await hasher.digest(extents) != source.digest:
            raise DigestMismatchError(
                f"the {extents.size_bytes} bytes read from rank {rank} do not have the digest that "
                f"rank {rank} computed before",
                rank=rank,
            )


def arrived_extents(
    program: Program, src_rank: int, order: ExecuteOrder, staged: StagedReads, memory: RegionTable
) -> Extents:
    """Return all bytes read from a source rank: in own pages, and in ``staged`` memory."""
    blocks, tokens = order.dst_blocks, order.tokens
    direct = direct_extents(program, src_rank, memory, DST, blocks, tokens)
    return Extents.joined([*direct, *staged.extents(src_rank)])


def cleared(program: Program, order: ExecuteOrder, memory: RegionTable) -> list[RowCopies]:
    """Return the rows of own pages that the program clears."""
    return _zeroed("cleared", program.rows(CLEAR_PAGES), program, order, memory)


def snapshots(program: Program, order: ExecuteOrder, memory: RegionTable) -> list[RowCopies]:
    """Return all snapshots of an order that failed: they are zeroed, so that no old state stays.

    Per-token pages need no zeroing: they are never read beyond the tokens that their request has
    computed.
    """
    per_token = np.array([pair.per_token for pair in program.group_pairs], bool)
    tables = [
        window_rows(step.rows) if step.form == PROJECT_SPANS else step.rows
        for step in program.steps
        if step.form.dst is Operand.PAGES
    ]
    rows = np.concatenate([no_rows(), *tables])
    rows = rows[~per_token[rows[:, Column.GROUP_PAIR]]]
    return _zeroed("snapshots", rows, program, order, memory)


def _zeroed(
    part: str, rows: Int64s, program: Program, order: ExecuteOrder, memory: RegionTable
) -> list[RowCopies]:
    if not len(rows):
        return []
    name, pages = (program.program_id, part), paged(memory, DST, order.dst_blocks)
    return [RowCopies(name, rows, program.group_pairs, None, pages, order.tokens)]


class StagedReads:
    """An order's memory in staging: the run that each source gathered, followed by the spans."""

    def __init__(self, program: Program, order: ExecuteOrder) -> None:
        """Lay the memory out, from address 0 for now."""
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
        """Move the memory to its address in staging."""
        self._begins = {rank: begin + address for rank, begin in self._begins.items()}
        spans = self.spans
        base = spans.base_address + address
        self.spans = RegionTable(base, spans.page_stride_bytes, spans.page_count)

    def reads(self, source: Source, peer: Peer, place: MemoryPlace) -> Iterator[Read]:
        """Yield the read of one source's run into staging, which is at ``place``.

        Raises `OrderInvalidError` if the run's length differs from the program's.
        """
        run = self._runs.get(source.src_rank)
        if run is None or not run.length_bytes:
            return
        _check_staged(source, run.length_bytes)
        begin = self._begins[source.src_rank]
        piece = Descriptors.single(source.staged_address, begin, run.length_bytes)
        yield Read(peer.agent_name, piece, peer.place, place)

    def extents(self, src_rank: int) -> list[Extents]:
        """Return the bytes read from one source, in the order in which they are hashed."""
        spans = staged_span_extents(self._program, src_rank, self.spans, self._order.tokens)
        run = self._runs.get(src_rank)
        gathered = [one_extent(self._begins[src_rank], run.length_bytes)] if run else []
        return [*gathered, *spans]

    def copies(self, memory: RegionTable) -> list[RowCopies]:
        """Return the copies from staging to own pages, to run when everything was read."""
        if not self.length_bytes:
            return []
        program, order = self._program, self._order
        pages = paged(memory, DST, order.dst_blocks)
        copies = [
            part
            for rank, run in self._runs.items()
            for part in run.scatter(pages, self._begins[rank])
        ]
        rows = program.rows(SCATTER_SPANS)
        if len(rows):
            spans = in_spans(self.spans, rows[:, Column.SRC_REGION])
            name = program.program_id, "spans"
            copies.append(RowCopies(name, rows, program.group_pairs, spans, pages, order.tokens))
        return copies

    def projections(self, memory: RegionTable) -> Int64s:
        """Return the products of inputs in spans with weights in own memory, as a project table."""
        return bind_projections(
            self._program.rows(PROJECT_SPANS),
            self._program.group_pairs,
            self.spans,
            memory,
            self._order.dst_blocks,
            self._order.tokens,
        )


def joined_reads(reads: Sequence[Read]) -> list[Read]:
    """Join reads from the same place of a peer to the same place; drop reads without pieces."""
    by_ends: dict[tuple[str, MemoryPlace, MemoryPlace], list[Descriptors]] = {}
    for read in reads:
        if len(read.descriptors.length_bytes):
            by_ends.setdefault((read.peer, read.src, read.dst), []).append(read.descriptors)
    return [
        Read(peer, Descriptors.joined(parts), src, dst)
        for (peer, src, dst), parts in by_ends.items()
    ]


def _check_staged(source: Source, length: int) -> None:
    if source.staged_bytes != length or not is_memory(source.staged_address, length):
        raise OrderInvalidError(
            f"rank {source.src_rank} staged {source.staged_bytes} bytes at address "
            f"{source.staged_address}, but the program needs {length} bytes",
            rank=source.src_rank,
        )
