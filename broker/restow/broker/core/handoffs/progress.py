"""How far a read is, by what agents report anyhow: each rank of D when it has ended its part."""

from __future__ import annotations

from dataclasses import dataclass

from restow.broker.core.handoffs.handoff import Handoff


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a granted handoff is."""

    bytes_read: int
    """By ranks that have settled."""
    expected_bytes: int
    """About what all ranks will have read."""
    ranks: int
    """That it is granted to."""
    settled_ranks: int


def progress_of(handoff: Handoff) -> Progress | None:
    """How far a handoff is; None: it is not granted, or has ended."""
    if handoff.pair is None or handoff.destination is None:
        return None
    ranks, early_bytes = len(handoff.pair.programs), handoff.early_bytes
    left_bytes = handoff.destination.state_bytes(handoff.first_token, handoff.stop_token)
    expected_bytes = early_bytes + left_bytes
    settled_ranks = ranks - len(handoff.unsettled)
    return Progress(
        handoff.bytes_read, max(expected_bytes, handoff.bytes_read), ranks, settled_ranks
    )
