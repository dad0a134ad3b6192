"""A rank of D in memory that a daemon can map."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from agent_harness.world import RankMemory, make_case
from restow.agents import DaemonAgent, SharedMemory, SharedRegion

CASE = make_case("wide")
RANK = 2


class SharedRank:
    """A rank of D whose memory others can map."""

    def __init__(self) -> None:
        layout = CASE.destination.ranks[RANK]
        size_bytes = RankMemory(layout, CASE.dst_ids).size_bytes
        self.shared = SharedMemory.create(size_bytes)
        data = np.frombuffer(self.shared.buffer, np.uint8)
        self.memory = RankMemory(layout, CASE.dst_ids, data)
        self.regions = [
            SharedRegion(
                region.name,
                self.shared.name,
                self.memory.offsets[region.name],
                self.memory.page_counts[region.name],
                region.page_stride_bytes,
            )
            for region in layout.regions
        ]


def attach(socket: Path, regions: list[SharedRegion]) -> DaemonAgent:
    return DaemonAgent(socket, "D", "life-1", RANK, regions)
