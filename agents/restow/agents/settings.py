"""How an agent works."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

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
