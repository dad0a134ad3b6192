"""The ranks of an engine: each one's paged memory, and the agent that serves it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import torch

from restow.agents.daemon_client import DaemonAgent
from restow.agents.engines.transformers.state_io import RankPages
from restow.agents.memory import SharedMemory, SharedRegion
from restow.broker.errors import RestowError
from restow.broker.layout import RankLayout

REGION_ALIGN_BYTES = 4096
READY_WORD = "ready"


class WorkerFailedError(RestowError):
    """The process of a rank ended before it was ready; its error is on stderr."""

    status = "UNAVAILABLE"
    reason = "WORKER_FAILED"


@dataclass(frozen=True, slots=True)
class Identity:
    """Whom a rank's agent serves."""

    broker: str
    engine_id: str
    incarnation: str
    rank: int


class RankAgent(Protocol):
    """What an engine asks of a rank's agent, wherever it runs."""

    def start(self) -> None:
        """Wait until the broker knows the agent."""

    def fence(self, handoff_id: str) -> None:
        """Say that the rank's part of a handoff is complete in memory."""

    def close(self) -> None:
        """Stop serving."""


class RankMemory:
    """The regions of one rank, one after the other in a POSIX shared-memory object."""

    def __init__(self, layout: RankLayout, page_counts: Sequence[int]) -> None:
        """Allocate; ``page_counts`` has one entry a region of the layout."""
        offsets, end = [], 0
        for region, pages in zip(layout.regions, page_counts, strict=True):
            offsets.append(end)
            size = region.page_stride_bytes * pages
            end += -(-size // REGION_ALIGN_BYTES) * REGION_ALIGN_BYTES
        self.shared = SharedMemory.create(max(end, 1))
        self.regions = tuple(
            SharedRegion(region.name, self.shared.name, offset, pages, region.page_stride_bytes)
            for region, offset, pages in zip(layout.regions, offsets, page_counts, strict=True)
        )
        whole = torch.frombuffer(self.shared.buffer, dtype=torch.uint8)
        self.pages = RankPages(
            layout,
            {
                region.name: whole[r.offset_bytes :][: r.page_count * r.page_stride_bytes]
                for region, r in zip(layout.regions, self.regions, strict=True)
            },
        )

    def close(self) -> None:
        """Give the memory back."""
        self.pages = RankPages(self.pages.layout, {})
        self.shared.close()


class WorkerAgent:
    """A rank's worker process that embeds its agent, as an engine's own worker would."""

    def __init__(self, identity: Identity, regions: Sequence[SharedRegion]) -> None:
        """Start the process; `start` waits for it."""
        self._identity = identity
        self._process = subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-m", "restow.agents.engines.transformers.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        self._say({**asdict(identity), "regions": [asdict(region) for region in regions]})

    def start(self) -> None:
        """Wait until the broker knows the agent. Raises `WorkerFailedError`."""
        line = self._process.stdout.readline() if self._process.stdout else ""
        if line.strip() != READY_WORD:
            raise WorkerFailedError(
                f"the worker of engine {self._identity.engine_id}, rank {self._identity.rank} "
                f"did not start: {line.strip() or 'see its error above'}",
                engine=self._identity.engine_id,
                rank=self._identity.rank,
            )

    def fence(self, handoff_id: str) -> None:
        """Say that the rank's part of a handoff is complete in memory."""
        self._say({"fence": handoff_id})

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _say(self, message: object) -> None:
        if self._process.stdin is not None:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()


def serve_rank(
    identity: Identity, regions: Sequence[SharedRegion], socket: Path | None
) -> RankAgent:
    """An agent for a rank: in a worker process, or in the daemon behind ``socket``."""
    if socket is None:
        return WorkerAgent(identity, regions)
    return DaemonAgent(socket, identity.engine_id, identity.incarnation, identity.rank, regions)
