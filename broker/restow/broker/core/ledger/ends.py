"""Ends of handoffs: what both sides are told, and what waits because D may still be written."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from restow.broker.core.common.actions import Action, TellEnded
from restow.broker.core.common.keys import Counterpart, EngineKey, State
from restow.broker.core.engines.account import Tenants
from restow.broker.core.engines.engine import EngineRecord
from restow.broker.core.handoffs.demand import is_compared
from restow.broker.core.handoffs.handoff import Handoff


def told(handoff: Handoff, engine: EngineRecord, demand: int | None = None) -> TellEnded:
    """Return how the handoff ended, for P; for D, ``demand`` is the message that it ends."""
    state, failure, published = handoff.state, handoff.failure, handoff.side.publication
    readers = (handoff.parent or handoff).deliveries.readers
    if demand is not None or not readers:
        compared = bool(published.content) and is_compared(published, handoff.demand)
        counterparts = _demand(handoff) if demand is None else _publication(handoff)
    else:
        # The deliveries that ended as their publication ended, with success or without.
        parts = [
            part
            for part in handoff.deliveries.by_engine.values()
            if part.ended and (state is State.DONE) == (part.failure is None)
        ]
        compared = bool(parts) and all(is_compared(published, part.demand) for part in parts)
        counterparts = tuple([counterpart for part in parts for counterpart in _demand(part)])
    return TellEnded(
        engine.key,
        handoff.handoff_id,
        state,
        failure.reason if failure is not None else "",
        failure.detail if failure is not None else "",
        handoff.bytes_read,
        int((handoff.ended_s - handoff.granted_s) * 1e6) if handoff.granted_s else 0,
        demand,
        delivered(handoff),
        published.position_tokens,
        compared,
        counterparts,
        published.sampled_token if demand is None else None,
        readers,
    )


def _publication(handoff: Handoff) -> tuple[Counterpart, ...]:
    """Return P and the number of its message, for D."""
    side = handoff.side
    if side.engine is None or not side.number:
        return ()
    return (Counterpart(side.engine.key.engine_id, side.engine.incarnation, (side.number,)),)


def _demand(handoff: Handoff) -> tuple[Counterpart, ...]:
    """Return D and the numbers of its session's messages, for P."""
    engine, numbers = handoff.destination, handoff.demand_messages.numbers
    if engine is None or max(numbers, default=0) < 1:
        return ()
    numbers = tuple([number for number in numbers if number > 0])
    agents = engine.fingerprint() if handoff.failure is None else b""
    return (Counterpart(engine.key.engine_id, engine.incarnation, numbers, agents),)


def delivered(handoff: Handoff) -> int:
    """Return how many D's have the state of the handoff."""
    return handoff.deliveries.done or int(handoff.state is State.DONE)


def told_destination(handoff: Handoff, destination: EngineRecord) -> list[Action]:
    """Return how the handoff ended, for each message of D's that asked for it."""
    return [told(handoff, destination, number) for number in handoff.demand_messages.numbers]


@dataclass(slots=True)
class _Held:
    """An ended handoff whose D has not been told, and the ranks that have not reported."""

    handoff: Handoff
    ranks: set[int]


class Quarantine:
    """Ended handoffs whose pages some rank of D may still write; D is told when no rank may.

    `EngineRecord.quarantined` has the numbers of an engine's quarantined handoffs.
    """

    def __init__(self, tenants: Tenants) -> None:
        """Begin empty; ``tenants`` counts the handoffs in quarantine."""
        self._tenants = tenants
        self.held: dict[tuple[EngineKey, int], _Held] = {}
        """Handoffs in quarantine, by D and number."""

    def __len__(self) -> int:
        """Return the number of handoffs in quarantine."""
        return len(self.held)

    def ranks(self, engine: EngineRecord, number: int) -> set[int]:
        """Return the ranks of D that a quarantined handoff waits for; empty if there is none."""
        held = self.held.get((engine.key, number))
        return held.ranks if held is not None else set()

    def hold(
        self, handoff: Handoff, engine: EngineRecord, ranks: Collection[int], now_s: float
    ) -> bool:
        """Quarantine an ended handoff if ``ranks`` of D may still write; False: D may be told."""
        if engine.gone or not ranks:
            return False
        if handoff.number not in engine.quarantined:
            self.held[engine.key, handoff.number] = _Held(handoff, set(ranks))
            engine.quarantined.add(handoff.number)
            self._tenants.add(engine.key.tenant, quarantined=1)
            handoff.timeline.note(now_s, "quarantined", sorted(ranks))
        return True

    def settled(self, engine: EngineRecord, number: int, rank: int, now_s: float) -> list[Action]:
        """Record that a rank has finished its part of a handoff, whether quarantined or not."""
        if number not in engine.quarantined:
            return []
        held = self.held[engine.key, number]
        held.ranks.discard(rank)
        if held.ranks:
            return []
        del self.held[engine.key, number]
        engine.quarantined.discard(number)
        self._tenants.add(engine.key.tenant, quarantined=-1)
        held.handoff.timeline.note(now_s, "released")
        if engine.in_use is not None:
            engine.in_use.give_back(held.handoff)
        return told_destination(held.handoff, engine)

    def heard(self, engine: EngineRecord, rank: int, now_s: float) -> list[Action]:
        """Record that the agent of a rank has said Hello, so that its old reads have ended."""
        actions: list[Action] = []
        for number in sorted(engine.quarantined):
            actions += self.settled(engine, number, rank, now_s)
        return actions

    def forget(self, engine: EngineRecord) -> None:
        """Forget the handoffs of an engine that is gone with its pages."""
        for number in engine.quarantined:
            self.held.pop((engine.key, number)).handoff.writing = 0
        self._tenants.add(engine.key.tenant, quarantined=-len(engine.quarantined))
        engine.quarantined.clear()
