"""Why a handoff ran out of time: what it still waited for, in words."""

from __future__ import annotations

from restow.broker.core.actions import State
from restow.broker.core.events import Failure
from restow.broker.core.handoff import Handoff


def why_late(handoff: Handoff, now_s: float) -> Failure:
    """What to say of a handoff that ran out of time."""
    if handoff.granted:
        words = f"ranks {sorted(handoff.unsettled)} did not settle inside the grant"
        agents = handoff.destination.agents if handoff.destination else {}
        if not handoff.unsettled <= agents.keys():
            return Failure(State.FAILED, "AGENT_LOST", f"{words}, and are not connected")
        return Failure(State.FAILED, "READ_DEADLINE", words)
    words = lacks(handoff)
    if 0 < handoff.agents_until_s <= now_s:
        engines = [one for one in (handoff.source, handoff.destination) if one is not None]
        lacking = next((one for one in engines if not one.complete), None)
        if lacking is not None and lacking.away.keys() & set(lacking.missing_ranks):
            return Failure(State.FAILED, "AGENT_LOST", f"{words}, and did not come back")
        return Failure(State.FAILED, "AGENT_MISSING", words)
    if 0 < handoff.patience_until_s <= now_s and handoff.queued:
        return Failure(State.EXPIRED, "READS_QUEUED", f"D's patience ran out: {words}")
    if 0 < handoff.patience_until_s <= now_s:
        return Failure(State.EXPIRED, "NOT_PUBLISHED", f"D's patience ran out: {words}")
    if 0 < handoff.unasked_until_s <= now_s:
        return Failure(State.EXPIRED, "NOT_ASKED_FOR", f"P's pages were of no use: {words}")
    return Failure(State.EXPIRED, "LEASE_EXPIRED", f"P's lease ran out: {words}")


def lacks(handoff: Handoff) -> str:
    """What a handoff that is not granted waits for, in words."""
    if handoff.source is None or not handoff.published:
        return "nobody published it"
    if not handoff.final:
        return f"engine {handoff.source.key.engine_id} has not published it whole"
    if not handoff.complete:
        ranks = [one.rank for one in handoff.source.layout.ranks if one.rank not in handoff.fenced]
        return f"ranks {ranks} of engine {handoff.source.key.engine_id} have not fenced it"
    if handoff.destination is None:
        return "nobody asked for it"
    for engine in (handoff.source, handoff.destination):
        if not engine.complete:
            name = engine.key.engine_id
            return f"engine {name}: no agent is connected for ranks {engine.missing_ranks}"
    if handoff.queued:
        return f"engine {handoff.destination.key.engine_id} reads the states of others first"
    return "the plan for it was not made in time"
