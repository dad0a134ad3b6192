"""The spans of a handoff: when it waited, was granted, was gathered for and read, by each rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from restow.broker.core.handoffs.handoff import Handoff


class SpanKind(StrEnum):
    """What goes on in a span."""

    WAIT = "wait"
    """P's state is not whole yet, or D has not asked for it."""
    GRANT = "grant"
    """Both have spoken, and the read is not ordered yet."""
    STAGE = "stage"
    """A rank of P gathers, or hashes, what one of D will read."""
    READ = "read"
    """A rank of D reads."""

    __hash__ = str.__hash__


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a handoff's time."""

    kind: SpanKind
    begin_s: float
    end_s: float
    """Of one that is not over: now."""
    rank: int | None = None
    """D's, of what is staged or read."""
    src_rank: int | None = None
    """P's, of what is staged."""
    bytes_read: int | None = None
    """What D's rank reported; None: nothing yet, or never."""
    over: bool = True


def spans_of(handoff: Handoff, now_s: float) -> list[Span]:
    """All spans that a handoff came to so far, by its latest grant."""
    until_s, over = (handoff.ended_s, True) if handoff.ended else (now_s, False)
    if not handoff.met_s:
        return [Span(SpanKind.WAIT, handoff.born_s, until_s, over=over)]
    wait = Span(SpanKind.WAIT, handoff.born_s, handoff.met_s)
    if not handoff.granted_s:
        return [wait, Span(SpanKind.GRANT, handoff.met_s, until_s, over=over)]
    grant = Span(SpanKind.GRANT, handoff.met_s, handoff.granted_s)
    return [wait, grant, *_of_ranks(handoff, until_s, over)]


def _of_ranks(handoff: Handoff, until_s: float, over: bool) -> Iterator[Span]:
    """What is staged, then what is read."""
    granted_s = handoff.granted_s
    staged_s: dict[int, float] = {}
    reads = []
    for at_s, event, detail in handoff.timeline:
        if at_s < granted_s:  # of a grant that was given back
            continue
        match event, detail:
            case "staged", (int(src_rank), int(rank)):
                staged_s[rank] = at_s
                yield Span(SpanKind.STAGE, granted_s, at_s, rank, src_rank)
            case "settled", (int(rank), int(size_bytes), int(elapsed_us)):
                begin_s = max(at_s - elapsed_us / 1e6, granted_s)
                reads.append(Span(SpanKind.READ, begin_s, at_s, rank, bytes_read=size_bytes))
    for rank in sorted(handoff.unsettled):
        if handoff.ended or handoff.may_read(rank):
            begin_s = staged_s.get(rank, granted_s)
            reads.append(Span(SpanKind.READ, begin_s, until_s, rank, over=over))
        elif handoff.pair is not None:
            for src_rank in handoff.pair.staging[rank]:
                if (rank, src_rank) not in handoff.staged:
                    yield Span(SpanKind.STAGE, granted_s, until_s, rank, src_rank, over=False)
    yield from sorted(reads, key=lambda one: -1 if one.rank is None else one.rank)
