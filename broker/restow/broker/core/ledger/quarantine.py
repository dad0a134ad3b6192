"""Quarantine: pages of D that may be written to although their handoff has ended.

An agent that is paused, cut off or behind a slow network may write to D's pages after the broker
gave it up, and no clock of the broker's tells when it will have stopped. So D hears of the end when
each of its ranks has reported, or its agent has said Hello again: that it does when nothing of an
earlier stream reads any more. P does not wait for it: what is read too late is never D's state.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from restow.broker.core.actions import Action, EngineKey
from restow.broker.core.engines.engine import EngineRecord
from restow.broker.core.engines.tenants import Tenants
from restow.broker.core.handoffs.handoff import Handoff
from restow.broker.core.ledger.ends import told_destination


@dataclass(slots=True)
class _Held:
    """An ended handoff whose D has not been told, and the ranks that were not heard of."""

    handoff: Handoff
    ranks: set[int]


class Quarantine:
    """Ended handoffs, by engine and number. `EngineRecord.quarantined` has those of an engine."""

    def __init__(self, tenants: Tenants) -> None:
        """Nothing is held; ``tenants`` are told what is."""
        self._tenants = tenants
        self._held: dict[tuple[EngineKey, int], _Held] = {}

    def __len__(self) -> int:
        """How many handoffs are held."""
        return len(self._held)

    def ranks(self, engine: EngineRecord, number: int) -> set[int]:
        """The ranks of D that a handoff waits for; none if it is not held."""
        held = self._held.get((engine.key, number))
        return held.ranks if held is not None else set()

    def hold(
        self, handoff: Handoff, engine: EngineRecord, ranks: Collection[int], now_s: float
    ) -> bool:
        """Hold an ended handoff if some ``ranks`` of D may still write; False: D may be told."""
        if engine.gone or not ranks:
            return False
        if handoff.number not in engine.quarantined:
            self._held[engine.key, handoff.number] = _Held(handoff, set(ranks))
            engine.quarantined.add(handoff.number)
            self._tenants.add_quarantined(engine.key.tenant, 1)
            handoff.timeline.note(now_s, "quarantined", sorted(ranks))
        return True

    def settled(self, engine: EngineRecord, number: int, rank: int, now_s: float) -> list[Action]:
        """A rank has ended its part of a handoff that is held, or of any other."""
        if number not in engine.quarantined:
            return []
        held = self._held[engine.key, number]
        held.ranks.discard(rank)
        if held.ranks:
            return []
        del self._held[engine.key, number]
        engine.quarantined.discard(number)
        self._tenants.add_quarantined(engine.key.tenant, -1)
        held.handoff.timeline.note(now_s, "released")
        if engine.in_use is not None:
            engine.in_use.give_back(held.handoff)
        return told_destination(held.handoff, engine)

    def heard(self, engine: EngineRecord, rank: int, now_s: float) -> list[Action]:
        """The agent of a rank has said Hello."""
        actions: list[Action] = []
        for number in sorted(engine.quarantined):
            actions += self.settled(engine, number, rank, now_s)
        return actions

    def forget(self, engine: EngineRecord) -> None:
        """An engine is gone, and its pages with it."""
        for number in engine.quarantined:
            self._held.pop((engine.key, number)).handoff.writing = 0
        self._tenants.add_quarantined(engine.key.tenant, -len(engine.quarantined))
        engine.quarantined.clear()
