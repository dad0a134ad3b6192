"""What is read straight into place: rows laid over the memory of both ranks, once for each peer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from restow.agents.binding import Reads, RegionTable
from restow.agents.lane import Read
from restow.agents.memory import Place, are_at
from restow.agents.orders import ExecuteOrder, Peer
from restow.broker.layout.rows import Int64s
from restow.broker.planner.program import Column, Program

_Kept = list[tuple[Place, Place, Reads]]


class DirectReads:
    """Binds direct rows; keeps what binding a handoff need not do again."""

    def __init__(self, memory: RegionTable, places: Sequence[Place]) -> None:
        """Into the pages of ``memory``, whose regions are at ``places``."""
        self._memory, self._places = memory, places
        self._kept: dict[tuple[str, int, str], _Kept] = {}
        """By program, source rank and peer."""

    def bind(
        self, program: Program, order: ExecuteOrder, src_rank: int, peer: Peer
    ) -> Iterator[Read]:
        """One read for each pair of kinds of memory, which is nearly always one."""
        key = (program.program_id, src_rank, peer.agent_name)
        kept = self._kept.get(key)
        if kept is None:
            rows = program.direct[program.direct[:, Column.SRC_RANK] == src_rank]
            kept = self._kept[key] = [
                (src, dst, Reads.of(part, program.group_pairs, peer.regions, self._memory))
                for src, dst, part in self._by_place(rows, peer)
            ]
        for src, dst, reads in kept:
            descriptors = reads.bind(order.src_blocks, order.dst_blocks, order.tokens)
            if len(descriptors.length_bytes):
                yield Read(peer.agent_name, descriptors, src, dst)

    def forget_peer(self, agent_name: str) -> None:
        """Its memory may be elsewhere when it comes back. May be repeated."""
        for key in [key for key in self._kept if key[2] == agent_name]:
            del self._kept[key]

    def clear(self) -> None:
        """Forget all."""
        self._kept.clear()

    def _by_place(self, rows: Int64s, peer: Peer) -> Iterator[tuple[Place, Place, Int64s]]:
        for src in set(peer.places):
            for dst in set(self._places):
                here = are_at(self._places, dst)[rows[:, Column.DST_REGION]]
                part = rows[here & are_at(peer.places, src)[rows[:, Column.SRC_REGION]]]
                if len(part):
                    yield src, dst, part
