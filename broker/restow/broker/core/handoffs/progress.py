"""What a handoff waits for, how far its read is, and how long each part took."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from restow.broker.core.common.events import Failure
from restow.broker.core.common.keys import State
from restow.broker.core.engines.engine import EngineRecord
from restow.broker.core.handoffs.handoff import Handoff
from restow.broker.core.handoffs.timeline import PLAN


def waits_for(handoff: Handoff) -> str:
    """Describe what a handoff without a grant waits for."""
    source, destination = handoff.source, handoff.destination
    if source is None and handoff.offer is not None and handoff.offer.engine is not None:
        return f"engine {handoff.offer.engine.engine_id} has not answered the offer"
    if source is None:
        return "nobody published it"
    if not handoff.publication.final:
        return f"engine {source.key.engine_id} has not published all of it"
    if not handoff.complete:
        ranks = [rank.rank for rank in source.layout.ranks if rank.rank not in handoff.side.fenced]
        return f"ranks {ranks} of engine {source.key.engine_id} have not fenced it"
    if handoff.shared:
        return handoff.deliveries.in_words()
    if destination is None:
        refusal = handoff.timeline.refusal
        return f"nobody else asked for it; {refusal}" if refusal else "nobody asked for it"
    if (lacking := _lacking(handoff)) is not None:
        name, ranks = lacking.key.engine_id, lacking.missing_ranks
        return f"engine {name}: no agent is connected for ranks {ranks}"
    if not handoff.stands:
        unsaid = source if handoff.side.said_s < source.repeat_from_s else destination
        return f"engine {unsaid.key.engine_id} has not repeated it since its session ended"
    if (taken := _no_place(handoff)) is not None:
        return taken
    if handoff.queued:
        return f"engine {destination.key.engine_id} reads other states first"
    if handoff.timeline.waits(PLAN):
        return "the plan is not ready"
    return "the costs of reading are being measured"


def _lacking(handoff: Handoff) -> EngineRecord | None:
    """Return a side whose agents are not all connected; None if both are complete or unknown."""
    sides = (handoff.source, handoff.destination)
    return next((side for side in sides if side is not None and not side.complete), None)


def _no_place(handoff: Handoff) -> str | None:
    """Describe why a delivery waits for earlier demands; None if it does not wait."""
    if handoff.parent is None or handoff.parent.deliveries.has_place:
        return None
    return f"every reader's place is taken: {handoff.parent.deliveries.in_words()}"


def why_late(handoff: Handoff, lacks: str, draining: bool, now_s: float) -> Failure:
    """Return why a handoff that ran out of time failed; ``lacks`` describes what it waited for.

    ``draining`` says that the broker grants nothing any more.
    """
    if handoff.granted:
        return _why_unsettled(handoff)
    lease = handoff.lease
    if 0 < lease.agents_until_s <= now_s:
        lacking = _lacking(handoff)
        if lacking is not None and lacking.away.keys() & set(lacking.missing_ranks):
            return Failure(State.FAILED, "AGENT_LOST", f"{lacks}, and it did not come back")
        return Failure(State.FAILED, "AGENT_MISSING", lacks)
    if 0 < lease.patience_until_s <= now_s:
        return _why_impatient(handoff, draining, f"D's request timed out: {lacks}")
    if 0 < lease.unasked_until_s <= now_s:
        return Failure(State.EXPIRED, "NOT_ASKED_FOR", f"P's pages were released: {lacks}")
    return Failure(State.EXPIRED, "LEASE_EXPIRED", f"P's lease expired: {lacks}")


def _why_impatient(handoff: Handoff, draining: bool, words: str) -> Failure:
    """Return why a handoff failed whose D no longer waits."""
    if not handoff.complete:
        return Failure(State.EXPIRED, "NOT_PUBLISHED", words)
    if draining:
        return Failure(State.EXPIRED, "BROKER_DRAINING", words)
    if _lacking(handoff) is not None:
        return Failure(State.EXPIRED, "AGENT_MISSING", words)
    if _no_place(handoff) is not None:
        return Failure(State.EXPIRED, "HANDOFF_OWNED", words)
    if handoff.queued:
        return Failure(State.EXPIRED, "READS_QUEUED", words)
    if handoff.timeline.waits(PLAN):
        return Failure(State.EXPIRED, "PLAN_LATE", words)
    return Failure(State.EXPIRED, "COSTS_LATE", words)


def _why_unsettled(handoff: Handoff) -> Failure:
    """Return why a granted handoff failed some of whose ranks have not reported in time."""
    words = f"ranks {sorted(handoff.unsettled)} did not settle inside the grant"
    if handoff.destination is None or not handoff.unsettled <= handoff.destination.agents.keys():
        return Failure(State.FAILED, "AGENT_LOST", f"{words}, and are not connected")
    return Failure(State.FAILED, "READ_DEADLINE", words)


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
