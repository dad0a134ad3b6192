"""What a handoff waits for until it is granted, and why it ends where that takes too long."""

from __future__ import annotations

from restow.broker.core.actions import State
from restow.broker.core.engines.engine import EngineRecord
from restow.broker.core.events import Failure
from restow.broker.core.handoffs.handoff import Handoff
from restow.broker.core.handoffs.timeline import PLAN


def waits_for(handoff: Handoff) -> str:
    """What a handoff that is not granted waits for, in words."""
    source, destination = handoff.source, handoff.destination
    if source is None and handoff.offer is not None and handoff.offer.engine is not None:
        return f"engine {handoff.offer.engine.engine_id}, which is offered it, has not answered"
    if source is None:
        return "nobody published it"
    if not handoff.publication.final:
        return f"engine {source.key.engine_id} has not published it whole"
    if not handoff.complete:
        ranks = [one.rank for one in source.layout.ranks if one.rank not in handoff.fenced]
        return f"ranks {ranks} of engine {source.key.engine_id} have not fenced it"
    if handoff.shared:
        return handoff.deliveries.in_words()
    if destination is None:
        refusal = handoff.timeline.refusal
        return f"nobody else asked for it; {refusal}" if refusal else "nobody asked for it"
    if (lacking := _lacking(handoff)) is not None:
        name, ranks = lacking.key.engine_id, lacking.missing_ranks
        return f"engine {name}: no agent is connected for ranks {ranks}"
    if (taken := _no_place(handoff)) is not None:
        return taken
    if handoff.queued:
        return f"engine {destination.key.engine_id} reads the states of others first"
    if handoff.timeline.waits(PLAN):
        return "its plan is not made yet"
    return "what reading costs is being measured"


def _lacking(handoff: Handoff) -> EngineRecord | None:
    """Return a side whose agents are not all connected; None: both are complete, or unknown."""
    sides = (handoff.source, handoff.destination)
    return next((one for one in sides if one is not None and not one.complete), None)


def _no_place(handoff: Handoff) -> str | None:
    """Why a delivery waits for others that have asked before it; None: it does not."""
    if handoff.parent is None or handoff.parent.deliveries.has_place:
        return None
    return f"every reader's place is taken: {handoff.parent.deliveries.in_words()}"


def why_late(handoff: Handoff, lacks: str, halted: bool, now_s: float) -> Failure:
    """Return why a handoff ends that has run out of time while it lacked what ``lacks`` says.

    ``halted``: the broker grants nothing of P's.
    """
    if handoff.granted:
        return _why_unsettled(handoff)
    lease = handoff.lease
    if 0 < lease.agents_until_s <= now_s:
        lacking = _lacking(handoff)
        if lacking is not None and lacking.away.keys() & set(lacking.missing_ranks):
            return Failure(State.FAILED, "AGENT_LOST", f"{lacks}, and did not come back")
        return Failure(State.FAILED, "AGENT_MISSING", lacks)
    if 0 < lease.patience_until_s <= now_s:
        return _why_impatient(handoff, halted, f"D's patience ran out: {lacks}")
    if 0 < lease.unasked_until_s <= now_s:
        return Failure(State.EXPIRED, "NOT_ASKED_FOR", f"P's pages were of no use: {lacks}")
    return Failure(State.EXPIRED, "LEASE_EXPIRED", f"P's lease ran out: {lacks}")


def _why_impatient(handoff: Handoff, halted: bool, words: str) -> Failure:
    """Return why a handoff ends whose D waits no longer."""
    if not handoff.complete:
        return Failure(State.EXPIRED, "NOT_PUBLISHED", words)
    if halted:
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
    """Some ranks have not reported in time."""
    words = f"ranks {sorted(handoff.unsettled)} did not settle inside the grant"
    if handoff.destination is None or not handoff.unsettled <= handoff.destination.agents.keys():
        return Failure(State.FAILED, "AGENT_LOST", f"{words}, and are not connected")
    return Failure(State.FAILED, "READ_DEADLINE", words)
