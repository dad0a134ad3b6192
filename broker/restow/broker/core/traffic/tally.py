"""A tally: how many handoffs ended in some time, how, and what they read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from restow.broker.core.actions import State
from restow.broker.core.traffic.durations import QuantileCounts, slot_of


class End(NamedTuple):
    """What is counted of a handoff that has ended."""

    state: State
    bytes_read: int
    transfer_s: float | None
    """From the grant to its end; None: it was not granted."""
    slot: int
    """Of that duration, which several tallies count."""

    @classmethod
    def of(cls, state: State, bytes_read: int, transfer_s: float | None) -> End:
        """Note what is counted."""
        return cls(state, bytes_read, transfer_s, slot_of(transfer_s or 0.0))


@dataclass(slots=True)
class Tally:
    """Counts of ends. Bounded, however many are counted."""

    done: int = 0
    failed: int = 0
    """FAILED or EXPIRED."""
    cancelled: int = 0
    bytes_read: int = 0
    done_bytes: int = 0
    reading_s: float = 0.0
    """Those of DONE: what reading so much took, each handoff by itself."""
    transfers: QuantileCounts = field(default_factory=QuantileCounts)
    """Of DONE: what broke off early or hung would hide how long reading takes."""

    def count(self, end: End) -> None:
        """Count one."""
        self.bytes_read += end.bytes_read
        if end.state is State.DONE:
            self.done += 1
            if end.transfer_s is not None:
                self.done_bytes += end.bytes_read
                self.reading_s += end.transfer_s
                self.transfers.add(end.slot)
        elif end.state is State.CANCELLED:
            self.cancelled += 1
        else:
            self.failed += 1

    def add(self, other: Tally) -> None:
        """Count what ``other`` counted."""
        self.done += other.done
        self.failed += other.failed
        self.cancelled += other.cancelled
        self.bytes_read += other.bytes_read
        self.done_bytes += other.done_bytes
        self.reading_s += other.reading_s
        self.transfers.add_all(other.transfers)

    def take_away(self, other: Tally) -> None:
        """Count no more what ``other`` counted, which was counted here as well."""
        self.done -= other.done
        self.failed -= other.failed
        self.cancelled -= other.cancelled
        self.bytes_read -= other.bytes_read
        self.done_bytes -= other.done_bytes
        self.reading_s = max(0.0, self.reading_s - other.reading_s)
        self.transfers.take_away(other.transfers)

    @property
    def ended(self) -> int:
        """How many ended, whatever way."""
        return self.done + self.failed + self.cancelled

    @property
    def bytes_per_s(self) -> float | None:
        """How fast one handoff was read, on average over the bytes; None: not known."""
        return self.done_bytes / self.reading_s if self.reading_s else None
