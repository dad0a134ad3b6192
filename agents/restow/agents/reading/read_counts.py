"""What became of reads, by the kind of transport that took them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from restow.agents.reading.transport import Transport

NIXL = "nixl"
PROCESS_VM_READV = "process_vm_readv"
KINDS = (NIXL, PROCESS_VM_READV)
"""Of all transports."""


@dataclass(slots=True)
class ReadCounts:
    """Counts the reads that one kind of transport took, since its agent began."""

    reads: int = 0
    """That ended well."""
    read_bytes: int = 0
    """Of those."""
    errors: int = 0
    """Reads that failed, and connections for them."""

    def add(self, other: ReadCounts) -> None:
        """Count what another has counted, too."""
        self.reads += other.reads
        self.read_bytes += other.read_bytes
        self.errors += other.errors


CountsByKind = dict[str, ReadCounts]


def no_reads(transports: Iterable[Transport] = ()) -> CountsByKind:
    """Counts of nothing, for all kinds and those of ``transports``."""
    return {kind: ReadCounts() for kind in (*KINDS, *(one.kind for one in transports))}


def add_all(counts: CountsByKind, others: Mapping[str, ReadCounts]) -> None:
    """Add to each kind's counts those of others."""
    for kind, other in others.items():
        counts.setdefault(kind, ReadCounts()).add(other)
