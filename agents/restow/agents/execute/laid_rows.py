"""What is kept of programs: their rows, laid over the memory of both ranks once for each peer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from restow.agents.binding.copies import Extraction
from restow.agents.binding.pages import RegionTable
from restow.agents.binding.reads import Reads, SpanReads
from restow.agents.execute.arrivals import ArrivingRows
from restow.agents.link.orders import Peer
from restow.agents.memory.regions import MemoryPlace, are_at
from restow.broker.layout.rows import Int64s
from restow.broker.planner.program import READ_PAGES, READ_SPANS, SCATTER_SPANS, Column, Program


@dataclass(frozen=True, slots=True)
class PeerRows:
    """What a program reads from one peer, by the peer's kind of memory and our own.

    Spans go to staging; there is nearly always one of each.
    """

    direct: tuple[tuple[MemoryPlace, MemoryPlace, Reads], ...]
    spans: tuple[tuple[MemoryPlace, SpanReads], ...]


class LaidRows:
    """Lays the rows of programs out; keeps what binding a handoff need not do again."""

    def __init__(self, memory: RegionTable, places: Sequence[MemoryPlace]) -> None:
        """Into the pages of ``memory``, whose regions are at ``places``."""
        self._memory, self._places = memory, places
        self._peers: dict[tuple[str, int, str], PeerRows] = {}
        """By program, source rank and peer."""
        self._arriving: dict[str, ArrivingRows] = {}
        """By program."""

    def from_peer(self, program: Program, src_rank: int, peer: Peer) -> PeerRows:
        """What is read from ``src_rank``, whose agent is ``peer``."""
        key = (program.program_id, src_rank, peer.agent_name)
        kept = self._peers.get(key)
        if kept is None:
            rows = program.rows(READ_PAGES, src_rank)
            kept = self._peers[key] = PeerRows(
                tuple(self._reads(rows, program, peer)),
                tuple(_span_reads(program, src_rank, peer)),
            )
        return kept

    def arriving(self, program: Program) -> ArrivingRows:
        """What arrives in staging first."""
        kept = self._arriving.get(program.program_id)
        if kept is None:
            extraction = Extraction(program.rows(SCATTER_SPANS), program.group_pairs, self._memory)
            kept = self._arriving[program.program_id] = ArrivingRows.of(program, extraction)
        return kept

    def forget_program(self, program_id: str) -> None:
        """Another may have its name from now on. May be repeated."""
        self._arriving.pop(program_id, None)
        for key in [key for key in self._peers if key[0] == program_id]:
            del self._peers[key]

    def forget_peer(self, agent_name: str) -> None:
        """Its memory may be elsewhere when it comes back. May be repeated."""
        for key in [key for key in self._peers if key[2] == agent_name]:
            del self._peers[key]

    def clear(self) -> None:
        """Forget all."""
        self._peers.clear()
        self._arriving.clear()

    def _reads(
        self, rows: Int64s, program: Program, peer: Peer
    ) -> Iterator[tuple[MemoryPlace, MemoryPlace, Reads]]:
        for src in set(peer.places):
            for dst in set(self._places):
                here = are_at(self._places, dst)[rows[:, Column.DST_REGION]]
                part = rows[here & are_at(peer.places, src)[rows[:, Column.SRC_REGION]]]
                if len(part):
                    laid = Reads.of(part, program.group_pairs, peer.regions, self._memory)
                    yield src, dst, laid


def _span_reads(
    program: Program, src_rank: int, peer: Peer
) -> Iterator[tuple[MemoryPlace, SpanReads]]:
    spans = program.rows(READ_SPANS)
    mine = spans[:, Column.SRC_RANK] == src_rank
    for src, at in peer.regions_at.items():
        chosen = mine.copy()
        chosen[mine] = at[spans[mine, Column.SRC_REGION]]
        if chosen.any():
            yield src, SpanReads.of(spans, chosen, program.group_pairs, peer.regions)
