"""What must be true of publications and their deliveries between two events, in words."""

from __future__ import annotations

from collections.abc import Iterator

from restow.broker.core.handoffs.deliveries import MAX_DELIVERIES
from restow.broker.core.handoffs.handoff import Handoff
from restow.broker.core.ledger.ledger import Ledger


def ended_of(ledger: Ledger) -> Iterator[Handoff]:
    """All that has ended and is remembered: handoffs, and deliveries of live and ended ones."""
    yield from ledger.ended.values()
    for handoff in (*ledger.live.values(), *ledger.ended.values()):
        yield from (one for one in handoff.deliveries.by_engine.values() if one.ended)


def check_deliveries(ledger: Ledger) -> Iterator[str]:
    """Every publication agrees with its deliveries."""
    for handoff in (*ledger.live.values(), *ledger.ended.values()):
        yield from _check(handoff)


def _check(handoff: Handoff) -> Iterator[str]:
    name, deliveries = handoff.handoff_id, handoff.deliveries
    if handoff.shared and handoff.destination is not None:
        yield f"handoff {name} is a publication, and has a demand of its own"
    if not handoff.shared and deliveries.by_engine:
        yield f"handoff {name} has deliveries, and nobody named readers"
    if len(deliveries.by_engine) > MAX_DELIVERIES:
        yield f"handoff {name} has {len(deliveries.by_engine)} deliveries"
    taken = deliveries.done + deliveries.declined + len(deliveries.reading)
    if taken > deliveries.readers and not handoff.ended:
        yield f"handoff {name} has more deliveries than readers: {deliveries.in_words()}"
    if deliveries.served and not handoff.ended:
        yield f"handoff {name} is served and lives"
    for key, one in deliveries.by_engine.items():
        if one.parent is not handoff or one.side is not handoff.side:
            yield f"a delivery of handoff {name} to {key.engine_id} is of another publication"
        if handoff.ended and not one.ended:
            yield f"handoff {name} has ended, and its delivery to {key.engine_id} lives"
        if not one.ended and one.lease.until_s != handoff.lease.until_s:
            yield f"handoff {name} has another lease than its delivery to {key.engine_id}"
        if one.granted and one.lease.grant_until_s >= handoff.lease.until_s:
            yield f"handoff {name} may be read by {key.engine_id} after its lease"
