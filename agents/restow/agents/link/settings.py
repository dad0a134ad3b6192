"""How an agent works."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field

from restow.agents.memory.staging import PoolFigures
from restow.agents.reading.lane import CountsByKind, add_all, no_reads
from restow.agents.reading.ucx_tls import allows_process_reads


def _read_threads() -> int:
    return min(2, len(os.sched_getaffinity(0)))


def _host_reads() -> bool:
    return allows_process_reads(os.environ.get("UCX_TLS"))


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """Says how an agent works."""

    staging_bytes: int = 64 << 20
    """Size of the pool for gathering, and of the one for scattering. 0: neither can be done."""
    quarantine_s: float = 6.0
    """How long a read that failed may take to end by itself."""
    read_threads: int = field(default_factory=_read_threads)
    """Threads that copy a large read between processes of one host: two, or as many as cores."""
    try_metadata: bool = True
    """Load a peer's NIXL metadata in another process first, which may die of it. That process is
    started with the agent, and idle but for each peer's first read."""
    host_reads: bool = field(default_factory=_host_reads)
    """Read other processes of this host, and be read by them, many pieces in one system call. On
    unless UCX is told to leave their memory alone (``UCX_TLS``)."""


NOTHING = PoolFigures()


@dataclass(frozen=True, slots=True)
class AgentFigures:
    """Figures of one agent, or of several together."""

    ranks: int = 0
    connected: int = 0
    """Ranks that the broker knows at the moment."""
    gather: PoolFigures = NOTHING
    scatter: PoolFigures = NOTHING
    lanes: int = 0
    """That are open."""
    lanes_given_up: int = 0
    """Since it began, because reads on them did not end."""
    reads: CountsByKind = field(default_factory=no_reads)
    """By kind of transport, since it began."""


def together(figures: Iterable[AgentFigures]) -> AgentFigures:
    """The figures of several agents."""
    all_of_them = tuple(figures)
    reads = no_reads()
    for one in all_of_them:
        add_all(reads, one.reads)
    return AgentFigures(
        sum(one.ranks for one in all_of_them),
        sum(one.connected for one in all_of_them),
        PoolFigures.together(one.gather for one in all_of_them),
        PoolFigures.together(one.scatter for one in all_of_them),
        sum(one.lanes for one in all_of_them),
        sum(one.lanes_given_up for one in all_of_them),
        reads,
    )


def past(figures: AgentFigures) -> AgentFigures:
    """What stays of an agent that is gone: what it has counted, and nothing that it held."""
    return AgentFigures(lanes_given_up=figures.lanes_given_up, reads=figures.reads)
