"""What a handoff waits for, and why a late handoff fails."""

from __future__ import annotations

from restow.broker.core.common.events import Failure
from restow.broker.core.common.keys import State
from restow.broker.core.engines.engine import EngineRecord
from restow.broker.core.handoffs.handoff import Handoff


def waits_for(handoff: Handoff) -> str:
    """Describe what a handoff without a grant waits for."""
    source, destination = handoff.source, handoff.destination
    if source is None and handoff.offer is not None and handoff.offer.engine is not None:
        return f"engine {handoff.offer.engine.engine_id} has not answered the offer"
    if source is None:
        return "nobody published it"
    if not handoff.publication.final:
        return f"engine {source.key.engine_id} has not published all of it"
    if not handoff.side.complete:
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
    if handoff.timeline.waits_for_plan:
        return "the plan is not ready"
    return "its grant was revoked and is not renewed yet"


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
    if not handoff.side.complete:
        return Failure(State.EXPIRED, "NOT_PUBLISHED", words)
    if draining:
        return Failure(State.EXPIRED, "BROKER_DRAINING", words)
    if _lacking(handoff) is not None:
        return Failure(State.EXPIRED, "AGENT_MISSING", words)
    if _no_place(handoff) is not None:
        return Failure(State.EXPIRED, "HANDOFF_OWNED", words)
    if handoff.timeline.waits_for_plan:
        return Failure(State.EXPIRED, "PLAN_LATE", words)
    return Failure(State.EXPIRED, "READS_QUEUED", words)


def _why_unsettled(handoff: Handoff) -> Failure:
    """Return why a granted handoff failed some of whose ranks have not reported in time."""
    words = f"ranks {sorted(handoff.unsettled)} did not settle inside the grant"
    if handoff.destination is None or not handoff.unsettled <= handoff.destination.agents.keys():
        return Failure(State.FAILED, "AGENT_LOST", f"{words}, and are not connected")
    return Failure(State.FAILED, "READ_DEADLINE", words)
