"""The ranks of an engine: their paged memory, its free blocks, and the agents that serve it."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random

import torch

from restow.agents.daemon.client import DaemonAgent
from restow.agents.engines.common.blocks import NULL_BLOCK
from restow.agents.memory.shared_memory import SharedMemory, SharedRegion
from restow.broker.errors import RestowError
from restow.broker.layout import RankLayout, Region
from restow.demo.transformers.rank_processes import ForkServer, RankIdentity, WorkerAgent
from restow.demo.transformers.state_io import RankTensors

REGION_ALIGN_BYTES = 4096


class OutOfBlocksError(RestowError, status="RESOURCE_EXHAUSTED", reason="OUT_OF_BLOCKS"):
    """A prompt needs more blocks than are free."""


class BlockPool:
    """The free blocks of one group, shuffled as after hours of serving. Safe for threads."""

    def __init__(self, region: Region, tokens: int, requests: int, seed: int) -> None:
        """Own the blocks of a region's group: for ``tokens``, or for the states of ``requests``."""
        self._group = region.group
        self._block_tokens = region.page_tokens and region.page_tokens * region.pages_per_block
        self.count = 1 + (-(-tokens // self._block_tokens) if self._block_tokens else requests)
        """The number of blocks, with the null block."""
        self._lock = threading.Lock()
        self._free = list(range(NULL_BLOCK + 1, self.count))
        Random(seed).shuffle(self._free)  # noqa: S311 - reproducible, not secret

    def take(self, tokens: int) -> list[int]:
        """Take out the blocks of a prompt's tokens, or of its state. Raises `OutOfBlocksError`."""
        count = -(-tokens // self._block_tokens) if self._block_tokens else 1
        with self._lock:
            if count > len(self._free):
                raise OutOfBlocksError(
                    f"group {self._group}: {count} blocks are wanted, {len(self._free)} are free",
                    group=self._group,
                )
            taken = self._free[:count]
            del self._free[:count]
        return taken

    def give_back(self, blocks: list[int]) -> None:
        """Put blocks back in."""
        with self._lock:
            self._free.extend(blocks)


def take_from_each(pools: Mapping[str, BlockPool], tokens: int) -> dict[str, list[int]]:
    """Take a prompt's blocks out of every group's pool. Raises `OutOfBlocksError`, taking none."""
    taken: dict[str, list[int]] = {}
    try:
        for group, pool in pools.items():
            taken[group] = pool.take(tokens)
    except OutOfBlocksError:
        for group, blocks in taken.items():
            pools[group].give_back(blocks)
        raise
    return taken


class RankMemory:
    """The regions of one rank, one after the other in a POSIX shared-memory object."""

    def __init__(self, layout: RankLayout, block_counts: Mapping[str, int]) -> None:
        """Allocate blocks by group; a region of no group (weights) has one page."""
        page_counts = [block_counts.get(r.group, 1) * r.pages_per_block for r in layout.regions]
        offsets, end = [], 0
        for region, pages in zip(layout.regions, page_counts, strict=True):
            offsets.append(end)
            size = region.page_stride_bytes * pages
            end += -(-size // REGION_ALIGN_BYTES) * REGION_ALIGN_BYTES
        self.shared = SharedMemory.create(max(end, 1))
        self.regions = tuple(
            SharedRegion(
                region.name,
                self.shared.name,
                offset,
                pages,
                region.page_stride_bytes,
                private=region.constant,
            )
            for region, offset, pages in zip(layout.regions, offsets, page_counts, strict=True)
        )
        whole = torch.frombuffer(self.shared.buffer, dtype=torch.uint8)
        self.pages = RankTensors(
            layout,
            {
                region.name: whole[r.offset_bytes :][: r.page_count * r.page_stride_bytes]
                for region, r in zip(layout.regions, self.regions, strict=True)
            },
        )

    def close(self) -> None:
        """Give the memory back."""
        self.pages = RankTensors(self.pages.layout, {})
        self.shared.close()


RankAgent = WorkerAgent | DaemonAgent


def serve_rank(
    identity: RankIdentity, regions: Sequence[SharedRegion], home: ForkServer | Path
) -> RankAgent:
    """Serve a rank by a process of a fork server, or by the daemon behind a socket."""
    if isinstance(home, ForkServer):
        return WorkerAgent(home, identity, regions)
    return DaemonAgent(home, identity.engine_id, identity.incarnation, identity.rank, regions)
