"""What programs read from peers: laid over the memory of both ranks once, bound to each order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from restow.agents.binding.pages import RegionTable
from restow.agents.binding.reads import Reads, SpanReads
from restow.agents.link.orders import ExecuteOrder, Peer
from restow.agents.memory.regions import MemoryPlace
from restow.agents.reading.transport import Read
from restow.broker.planner.program import READ_PAGES, READ_SPANS, Column, Program


@dataclass(frozen=True, slots=True)
class PeerReads:
    """What a program reads from one peer: straight into pages, and as spans into staging."""

    peer: Peer
    place: MemoryPlace
    """Where own pages and staging are."""
    direct: Reads | None
    spans: SpanReads | None

    def bind(self, order: ExecuteOrder, staged: RegionTable) -> Iterator[Read]:
        """The reads of one order, of spans to where they are ``staged``.

        Raises `PageCountError` and `PageRangeError`.
        """
        name, ends = self.peer.agent_name, (self.peer.place, self.place)
        if self.direct is not None:
            pieces = self.direct.bind(order.src_blocks, order.dst_blocks, order.tokens)
            yield Read(name, pieces, *ends)
        if self.spans is not None:
            yield Read(name, self.spans.bind(staged, order.src_blocks, order.tokens), *ends)


class KeptReads:
    """Lays what programs read over memory; keeps what binding an order need not do again."""

    def __init__(self, memory: RegionTable, place: MemoryPlace) -> None:
        """Into the pages of ``memory``, which is at ``place``."""
        self._memory, self._place = memory, place
        self._kept: dict[tuple[str, int, str], PeerReads] = {}
        """By program, source rank and peer."""

    def of(self, program: Program, src_rank: int, peer: Peer) -> PeerReads:
        """What is read from ``src_rank``, whose agent is ``peer``."""
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
