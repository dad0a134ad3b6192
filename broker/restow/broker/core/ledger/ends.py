"""How a handoff ended: as its engines are told, and as it is counted."""

from __future__ import annotations

from restow.broker.core.actions import Action, State, TellEnded
from restow.broker.core.engines.engine import EngineRecord
from restow.broker.core.handoffs.handoff import Handoff
from restow.broker.core.traffic.tally import End


def end_of(handoff: Handoff) -> End:
    """What is counted of a handoff that has ended."""
    return End.of(handoff.state, handoff.bytes_read, handoff.transfer_s)


def told(handoff: Handoff, engine: EngineRecord, demand: int | None = None) -> TellEnded:
    """How the handoff ended, for P; or for D, whose ``demand`` it ends."""
    failure = handoff.failure
    reason, detail = (failure.reason, failure.detail) if failure is not None else ("", "")
    return TellEnded(
        engine.key,
        handoff.handoff_id,
        handoff.state,
        reason,
        detail,
        handoff.bytes_read,
        int((handoff.transfer_s or 0.0) * 1e6),
        demand,
        delivered(handoff),
    )


def delivered(handoff: Handoff) -> int:
    """How many D's have the state of a handoff, or of the publication that it is."""
    return handoff.deliveries.done if handoff.shared else int(handoff.state is State.DONE)


def told_destination(handoff: Handoff, destination: EngineRecord) -> list[Action]:
    """How the handoff ended, for each message of D's that asked for it."""
    return [told(handoff, destination, number) for number in handoff.demand_messages.numbers]


def pair_ids(handoff: Handoff) -> tuple[str, str] | None:
    """The ids of P and D; None: one of them is not known."""
    if handoff.source is None or handoff.destination is None:
        return None
    return handoff.source.key.engine_id, handoff.destination.key.engine_id
