"""How far a handoff's read is, and how long each part took."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from restow.broker.core.handoffs.handoff import Handoff


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a granted handoff is."""

    bytes_read: int
    """Bytes read by ranks that have settled."""
    expected_bytes: int
    """Estimated total for all ranks."""
    ranks: int
    """Ranks that the grant is for."""
    settled_ranks: int


def progress_of(handoff: Handoff) -> Progress | None:
    """Return how far a handoff is; None if it is not granted or has ended."""
    if handoff.pair is None or handoff.destination is None:
        return None
    ranks, early_bytes = len(handoff.pair.programs), handoff.early_bytes
    left_bytes = handoff.destination.state_bytes(handoff.first_token, handoff.stop_token)
    expected_bytes = early_bytes + left_bytes
    settled_ranks = ranks - len(handoff.unsettled)
    return Progress(
        handoff.bytes_read, max(expected_bytes, handoff.bytes_read), ranks, settled_ranks
    )


class SpanKind(StrEnum):
    """What happens in a span."""

    WAIT = "wait"
    """P's state is not complete yet, or D has not asked for it."""
    GRANT = "grant"
    """Both sides are ready, and the read is not ordered yet."""
    STAGE = "stage"
    """A rank of P gathers or hashes for a rank of D."""
    READ = "read"
    """A rank of D reads."""

    __hash__ = str.__hash__


@dataclass(frozen=True, slots=True)
class TimeSpan:
    """A part of a handoff's time."""

    kind: SpanKind
    begin_s: float
    end_s: float
    """The present time if the span is not over."""
    rank: int | None = None
    """The rank of D that stages are for or that reads."""
    src_rank: int | None = None
    """The rank of P that stages."""
    bytes_read: int | None = None
    """What D's rank reported; None if it has reported nothing."""
    over: bool = True


def spans_of(handoff: Handoff, now_s: float) -> list[TimeSpan]:
    """Return all spans of a handoff up to now, of its latest grant."""
    until_s, over = (handoff.ended_s, True) if handoff.ended else (now_s, False)
    if not handoff.met_s:
        return [TimeSpan(SpanKind.WAIT, handoff.born_s, until_s, over=over)]
    wait = TimeSpan(SpanKind.WAIT, handoff.born_s, handoff.met_s)
    if not handoff.granted_s:
        return [wait, TimeSpan(SpanKind.GRANT, handoff.met_s, until_s, over=over)]
    grant = TimeSpan(SpanKind.GRANT, handoff.met_s, handoff.granted_s)
    return [wait, grant, *_of_ranks(handoff, until_s, over)]


def _of_ranks(handoff: Handoff, until_s: float, over: bool) -> Iterator[TimeSpan]:
    """Yield the spans of stages, then those of reads."""
    granted_s = handoff.granted_s
    staged_s: dict[int, float] = {}
    reads = []
    for at_s, event, detail in handoff.timeline:
        if at_s < granted_s:  # belongs to an earlier, revoked grant
            continue
        match event, detail:
            case "staged", (int(src_rank), int(rank)):
                staged_s[rank] = at_s
                yield TimeSpan(SpanKind.STAGE, granted_s, at_s, rank, src_rank)
            case "settled", (int(rank), int(size_bytes), int(elapsed_us)):
                begin_s = max(at_s - elapsed_us / 1e6, granted_s)
                reads.append(TimeSpan(SpanKind.READ, begin_s, at_s, rank, bytes_read=size_bytes))
    for rank in sorted(handoff.unsettled):
        if handoff.ended or handoff.may_read(rank):
            begin_s = staged_s.get(rank, granted_s)
            reads.append(TimeSpan(SpanKind.READ, begin_s, until_s, rank, over=over))
        elif handoff.pair is not None:
            for src_rank in handoff.pair.staging[rank]:
                if (rank, src_rank) not in handoff.staged:
                    yield TimeSpan(SpanKind.STAGE, granted_s, until_s, rank, src_rank, over=False)
    yield from sorted(reads, key=lambda read: -1 if read.rank is None else read.rank)
