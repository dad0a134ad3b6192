"""Each rank of an engine has paged memory, and an agent that serves it."""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from restow.agents.daemon.client import DaemonAgent
from restow.agents.engines.common.fork_server import ForkServer
from restow.agents.engines.common.rank_worker import READY_WORD
from restow.agents.engines.transformers.state_io import RankTensors
from restow.agents.memory.shared_memory import SharedMemory, SharedRegion
from restow.broker.errors import RestowError
from restow.broker.layout import RankLayout
from restow.broker.layout.values import ModelIdentity

REGION_ALIGN_BYTES = 4096


class WorkerFailedError(RestowError, status="UNAVAILABLE", reason="WORKER_FAILED"):
    """The process of a rank has ended; its error is on stderr."""


@dataclass(frozen=True, slots=True)
class RankIdentity:
    """Whom a rank's agent serves."""

    broker: str
    engine_id: str
    incarnation: str
    rank: int
    model: ModelIdentity


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


class WorkerAgent:
    """A rank's worker process that embeds its agent, as an engine's own worker would."""

    def __init__(
        self, forks: ForkServer, identity: RankIdentity, regions: Sequence[SharedRegion]
    ) -> None:
        """Fork the process; `start` waits for it."""
        self._identity = identity
        self._socket = forks.fork_worker()
        self._lines = self._socket.makefile("rw")
        self._say({**asdict(identity), "regions": [asdict(region) for region in regions]})

    def start(self) -> None:
        """Wait until the broker knows the agent. Raises `WorkerFailedError`."""
        line = self._lines.readline().strip()
        if line != READY_WORD:
            raise self._failed(f"did not start: {line or 'see its error above'}")

    @property
    def lost(self) -> bool:
        """Whether the process has ended: nothing brings it back but a new engine."""
        readable, _, _ = select.select([self._socket], [], [], 0)
        return bool(readable) and not self._socket.recv(1, socket.MSG_PEEK)

    def fence(self, handoff_id: str) -> None:
        """Say that the rank's part of a handoff is complete in memory.

        Raises `WorkerFailedError`.
        """
        try:
            self._say({"fence": handoff_id})
        except OSError as error:
            raise self._failed(f"has ended ({error}): start the engine again") from None

    def close(self) -> None:
        """End the process, and wait until it has given the memory back."""
        self._socket.shutdown(socket.SHUT_WR)
        self._lines.read()
        self._lines.close()
        self._socket.close()

    def _failed(self, words: str) -> WorkerFailedError:
        engine, rank = self._identity.engine_id, self._identity.rank
        return WorkerFailedError(
            f"the worker of engine {engine}, rank {rank} {words}", engine=engine, rank=rank
        )

    def _say(self, message: object) -> None:
        self._lines.write(json.dumps(message) + "\n")
        self._lines.flush()


RankAgent = WorkerAgent | DaemonAgent


def serve_rank(
    identity: RankIdentity, regions: Sequence[SharedRegion], home: ForkServer | Path
) -> RankAgent:
    """An agent for a rank: in a worker of a fork server, or in the daemon behind a socket."""
    if isinstance(home, ForkServer):
        return WorkerAgent(home, identity, regions)
    return DaemonAgent(
        *(home, identity.engine_id, identity.incarnation, identity.rank, regions),
        model=identity.model,
    )
