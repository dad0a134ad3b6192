"""What a handoff waits for until it is granted, and why it ends where that takes too long."""

from __future__ import annotations

from restow.broker.core.actions import State
from restow.broker.core.events import Failure
from restow.broker.core.handoffs.handoff import Handoff


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
        return "nobody asked for it"
    for engine in (source, destination):
        if not engine.complete:
            name, ranks = engine.key.engine_id, engine.missing_ranks
            return f"engine {name}: no agent is connected for ranks {ranks}"
    if (taken := _no_place(handoff)) is not None:
        return taken
    if handoff.queued:
        return f"engine {destination.key.engine_id} reads the states of others first"
    return "its plan is not made yet, or what reading costs is being measured"


def _no_place(handoff: Handoff) -> str | None:
    """Why a delivery waits for others that have asked before it; None: it does not."""
    if handoff.parent is None or handoff.parent.deliveries.has_place:
        return None
    return f"every reader's place is taken: {handoff.parent.deliveries.in_words()}"


def why_late(handoff: Handoff, now_s: float) -> Failure:
    """Why a handoff ends that has run out of time."""
    if handoff.granted:
        return _why_unsettled(handoff)
    lease, lacks = handoff.lease, waits_for(handoff)
    if 0 < lease.agents_until_s <= now_s:
        sides = [one for one in (handoff.source, handoff.destination) if one is not None]
        lacking = next((one for one in sides if not one.complete), None)
        if lacking is not None and lacking.away.keys() & set(lacking.missing_ranks):
            return Failure(State.FAILED, "AGENT_LOST", f"{lacks}, and did not come back")
        return Failure(State.FAILED, "AGENT_MISSING", lacks)
    if 0 < lease.patience_until_s <= now_s:
        words = f"D's patience ran out: {lacks}"
        if handoff.complete and _no_place(handoff) is not None:
            return Failure(State.EXPIRED, "HANDOFF_OWNED", words)
        if handoff.queued:
            return Failure(State.EXPIRED, "READS_QUEUED", words)
        return Failure(State.EXPIRED, "NOT_PUBLISHED", words)
    if 0 < lease.unasked_until_s <= now_s:
        return Failure(State.EXPIRED, "NOT_ASKED_FOR", f"P's pages were of no use: {lacks}")
    return Failure(State.EXPIRED, "LEASE_EXPIRED", f"P's lease ran out: {lacks}")


def _why_unsettled(handoff: Handoff) -> Failure:
    """Some ranks have not reported in time."""
    words = f"ranks {sorted(handoff.unsettled)} did not settle inside the grant"
    if handoff.destination is None or not handoff.unsettled <= handoff.destination.agents.keys():
        return Failure(State.FAILED, "AGENT_LOST", f"{words}, and are not connected")
    return Failure(State.FAILED, "READ_DEADLINE", words)
