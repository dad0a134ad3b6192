"""What programs read from peers: laid over the memory of both ranks once, bound to each order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from restow.agents.binding.pages import RegionTable
from restow.agents.binding.reads import Reads, SpanReads
from restow.agents.link.orders import ExecuteOrder, Peer
from restow.agents.memory.regions import MemoryPlace, are_at
from restow.agents.reading.transport import Read
from restow.broker.planner.program import READ_PAGES, READ_SPANS, Column, Program


@dataclass(frozen=True, slots=True)
class PeerReads:
    """What a program reads from one peer, by the peer's kind of memory and our own.

    Spans go to staging; there is nearly always one of each.
    """

    direct: tuple[tuple[MemoryPlace, MemoryPlace, Reads], ...]
    spans: tuple[tuple[MemoryPlace, SpanReads], ...]

    def bind(
        self, order: ExecuteOrder, agent_name: str, staged: RegionTable, staging: MemoryPlace
    ) -> Iterator[Read]:
        """The reads of one order, of spans to where they are ``staged``.

        Raises `PageCountError` and `PageRangeError`.
        """
        for src, dst, direct in self.direct:
            pieces = direct.bind(order.src_blocks, order.dst_blocks, order.tokens)
            yield Read(agent_name, pieces, src, dst)
        for src, spans in self.spans:
            yield Read(agent_name, spans.bind(staged, order.src_blocks, order.tokens), src, staging)


class KeptReads:
    """Lays what programs read over memory; keeps what binding an order need not do again."""

    def __init__(self, memory: RegionTable, places: Sequence[MemoryPlace]) -> None:
        """Into the pages of ``memory``, whose regions are at ``places``."""
        self._memory, self._places = memory, places
        self._kept: dict[tuple[str, int, str], PeerReads] = {}
        """By program, source rank and peer."""

    def of(self, program: Program, src_rank: int, peer: Peer) -> PeerReads:
        """What is read from ``src_rank``, whose agent is ``peer``."""
        key = (program.program_id, src_rank, peer.agent_name)
        kept = self._kept.get(key)
        if kept is None:
            kept = self._kept[key] = PeerReads(
                tuple(self._direct(program, src_rank, peer)),
                tuple(_spans(program, src_rank, peer)),
            )
        return kept

    def forget_program(self, program_id: str) -> None:
        """Another may have its name from now on. May be repeated."""
        for key in [key for key in self._kept if key[0] == program_id]:
            del self._kept[key]

    def forget_peer(self, agent_name: str) -> None:
        """Its memory may be elsewhere when it comes back. May be repeated."""
        for key in [key for key in self._kept if key[2] == agent_name]:
            del self._kept[key]

    def clear(self) -> None:
        """Forget all."""
        self._kept.clear()

    def _direct(
        self, program: Program, src_rank: int, peer: Peer
    ) -> Iterator[tuple[MemoryPlace, MemoryPlace, Reads]]:
        rows = program.rows(READ_PAGES, src_rank)
        for src, at in peer.regions_at.items():
            for dst in set(self._places):
                here = are_at(self._places, dst)[rows[:, Column.DST_REGION]]
                part = rows[here & at[rows[:, Column.SRC_REGION]]]
                if len(part):
                    laid = Reads.of(part, program.group_pairs, peer.regions, self._memory)
                    yield src, dst, laid


def _spans(program: Program, src_rank: int, peer: Peer) -> Iterator[tuple[MemoryPlace, SpanReads]]:
    spans = program.rows(READ_SPANS)
    mine = spans[:, Column.SRC_RANK] == src_rank
    for src, at in peer.regions_at.items():
        chosen = mine.copy()
        chosen[mine] = at[spans[mine, Column.SRC_REGION]]
        if chosen.any():
            yield src, SpanReads.of(spans, chosen, program.group_pairs, peer.regions)
