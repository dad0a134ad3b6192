"""Settings of an agent, and figures of what it does."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field

from restow.agents.memory.staging import PoolFigures
from restow.agents.reading.lane import CountsByKind, add_all, no_reads
from restow.agents.reading.ucx import allows_process_reads


def _read_threads() -> int:
    return min(2, len(os.sched_getaffinity(0)))


def _host_reads() -> bool:
    return allows_process_reads(os.environ.get("UCX_TLS"))


def _device_reads() -> bool:
    return os.environ.get("RESTOW_DEVICE_READS") == "1"


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """Settings of an agent."""

    staging_bytes: int = 64 << 20
    """Size of the pool for gathering, and of the pool for scattering. 0 disables both."""
    quarantine_s: float = 6.0
    """Time that a failed read gets to end by itself."""
    read_threads: int = field(default_factory=_read_threads)
    """Threads for a large read between processes of a host; by default two, or one per core."""
    try_metadata: bool = True
    """Load a peer's NIXL metadata in another process first, which may crash in place of the agent.

    That process starts with the agent, and works only at each peer's first read.
    """
    host_reads: bool = field(default_factory=_host_reads)
    """Read other processes of this host, and be read by them, many pieces in one system call.

    On by default, unless ``UCX_TLS`` excludes reads of other processes' memory.
    """
    device_reads: bool = field(default_factory=_device_reads)
    """Map the memory of other processes on the same CUDA device, and let them map this rank's.

    Needs ``host_reads``. Off unless ``RESTOW_DEVICE_READS`` is 1, because it was not tried on a GPU
    yet.
    """


NOTHING = PoolFigures()


@dataclass(frozen=True, slots=True)
class AgentFigures:
    """Figures of one agent, or the sum over several."""

    ranks: int = 0
    connected: int = 0
    """Ranks that the broker knows now."""
    gather: PoolFigures = NOTHING
    scatter: PoolFigures = NOTHING
    lanes: int = 0
    """Open lanes."""
    lanes_given_up: int = 0
    """Lanes given up since the start, because reads on them did not end."""
    reads: CountsByKind = field(default_factory=no_reads)
    """Reads since the start, by kind of transport."""


def together(figures: Iterable[AgentFigures]) -> AgentFigures:
    """Add up the figures of several agents."""
    several = tuple(figures)
    reads = no_reads()
    for agent in several:
        add_all(reads, agent.reads)
    return AgentFigures(
        sum(agent.ranks for agent in several),
        sum(agent.connected for agent in several),
        PoolFigures.together(agent.gather for agent in several),
        PoolFigures.together(agent.scatter for agent in several),
        sum(agent.lanes for agent in several),
        sum(agent.lanes_given_up for agent in several),
        reads,
    )


def past(figures: AgentFigures) -> AgentFigures:
    """Return the counts of an agent that is gone, without what it had in use."""
    return AgentFigures(lanes_given_up=figures.lanes_given_up, reads=figures.reads)
