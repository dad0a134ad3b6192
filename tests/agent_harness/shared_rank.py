"""A rank in memory that a daemon can map."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Self

import numpy as np

from agent_harness.world import RankMemory, make_case
from restow.agents import DaemonAgent, SharedMemory, SharedRegion
from restow.broker.families import AttentionSpec, EngineSettings, ModelSpec, build_layout
from restow.broker.layout import DType, RankLayout

CASE = make_case("wide")
RANK = 2
SMALL = build_layout(
    ModelSpec("m", (AttentionSpec(0, 2, 16, DType.BFLOAT16),)), EngineSettings(page_tokens=16)
)
"""A layout of one rank with one region."""


class SharedRank:
    """A rank, of D if no other is given, whose memory others can map."""

    def __init__(
        self,
        layout: RankLayout = CASE.destination.ranks[RANK],
        ids: Mapping[str, tuple[int, ...]] = CASE.dst_ids,
    ) -> None:
        self.shared = SharedMemory.create(RankMemory(layout, ids).size_bytes)
        data = np.frombuffer(self.shared.buffer, np.uint8)
        self.memory = RankMemory(layout, ids, data)
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shared.close()


def small_rank() -> SharedRank:
    """Return the rank of `SMALL`."""
    return SharedRank(SMALL.ranks[0], {"attention": (1,)})


def attach(socket: Path, regions: list[SharedRegion]) -> DaemonAgent:
    return DaemonAgent(socket, "D", "life-1", RANK, regions)
