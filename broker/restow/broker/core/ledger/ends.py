"""How a handoff ended: as its engines are told, and as it is counted."""

from __future__ import annotations

from restow.broker.core.actions import Action, Counterpart, State, TellEnded
from restow.broker.core.engines.engine import EngineRecord
from restow.broker.core.handoffs.handoff import Handoff
from restow.broker.core.handoffs.sides.demand import is_compared
from restow.broker.core.traffic.tally import End


def end_of(handoff: Handoff) -> End:
    """What is counted of a handoff that has ended."""
    return End.of(handoff.state, handoff.bytes_read, handoff.transfer_s)


def told(handoff: Handoff, engine: EngineRecord, demand: int | None = None) -> TellEnded:
    """How the handoff ended, for P; or for D, whose ``demand`` it ends."""
    failure = handoff.failure
    reason, detail = (failure.reason, failure.detail) if failure is not None else ("", "")
    published = handoff.publication
    if demand is not None:
        compared, others = is_compared(published, handoff.demand), _publication(handoff)
    elif not handoff.shared:
        compared, others = is_compared(published, handoff.demand), _demand(handoff)
    else:
        parts = [one for one in _parts(handoff) if one.ended]
        compared = bool(parts) and all(is_compared(published, one.demand) for one in parts)
        others = tuple([other for one in parts for other in _demand(one)])
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
        published.position_tokens,
        compared,
        others,
        published.sampled_token if demand is None else None,
        (handoff.parent or handoff).deliveries.readers,
    )


def _parts(handoff: Handoff) -> list[Handoff]:
    """Return the deliveries that ended as their publication did: well or not."""
    done = handoff.state is State.DONE
    return [one for one in handoff.deliveries.by_engine.values() if done == (one.failure is None)]


def _publication(handoff: Handoff) -> tuple[Counterpart, ...]:
    """P and its words, as D is told them."""
    source, side = handoff.source, handoff.side
    if source is None or not side.number:
        return ()
    return (Counterpart(source.key.engine_id, source.incarnation, (side.number,)),)


def _demand(handoff: Handoff) -> tuple[Counterpart, ...]:
    """Return D and its words, as P is told them: those by a session, which have numbers."""
    engine, numbers = handoff.destination, handoff.demand_messages.numbers
    if engine is None or not numbers:
        return ()
    if min(numbers) < 1:
        numbers = tuple([number for number in numbers if number > 0])
        if not numbers:
            return ()
    agents = engine.fingerprint() if handoff.failure is None else b""
    return (Counterpart(engine.key.engine_id, engine.incarnation, numbers, agents),)


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
