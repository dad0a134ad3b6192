"""Demanding: D asks for a handoff, or goes on without it, and one that has ended is told again."""

from __future__ import annotations

from math import inf

from restow.broker.core.actions import Action, State
from restow.broker.core.engines.engine import EngineRecord
from restow.broker.core.engines.pages_in_use import PagesInUse
from restow.broker.core.events import Failure, Wish
from restow.broker.core.granting import Granting
from restow.broker.core.handoffs.conflicts import waited_for
from restow.broker.core.handoffs.deliveries import is_served
from restow.broker.core.handoffs.handoff import Handoff
from restow.broker.core.ledger.ends import told
from restow.broker.core.ledger.ledger import Ledger
from restow.broker.core.offering import Offering
from restow.broker.errors import RestowError


class Demanding:
    """What D's say. Pure, like the directory that it serves."""

    def __init__(self, ledger: Ledger, granting: Granting, offering: Offering) -> None:
        """Hear nobody yet."""
        self._ledger, self._granting, self._offering = ledger, granting, offering

    def request(
        self, engine: EngineRecord, handoff_id: str, wish: Wish, now_s: float
    ) -> list[Action]:
        """D asks, once or again. Raises a typed error; then nothing changed."""
        engine.check_there()
        known = self._ledger.hear(engine, handoff_id, now_s)
        if known is not None and (over := self._over(known, engine, wish.repeated, now_s)):
            over.check_asked_before(engine, wish)
            if wish.repeated:
                self._ledger.quarantine.hold(over, engine, engine.unheard_ranks, now_s)
            return self._told_again(over, engine, wish.demand)
        handoff = known or self._ledger.make(engine.key.tenant, handoff_id, now_s)
        try:
            asking = self._ask(handoff, engine, wish, now_s, handoff.born_s if known else inf)
        except RestowError:
            if known is None:
                self._ledger.unmake(handoff)
            else:
                self._ledger.wait_for_demand(handoff, now_s)
            raise
        if asking is None:
            return self._ledger.part_of(handoff, engine).tell_sampled()
        engine.asks = True
        if wish.revision != engine.revision and not engine.has_revision(wish.revision):
            return self._ledger.stop(asking, revision_changed(engine), now_s)
        ended = self._ledger.known_ends.complete(asking, now_s) if wish.repeated else []
        if asking.ended:  # with no action yet where D's agents are not back
            return ended
        if wish.prefix is not None and asking.source is None:
            return self._offering.begin(asking, wish.prefix, now_s)
        return self._granting.advance(asking, now_s)

    def _over(
        self, handoff: Handoff, engine: EngineRecord, again: bool, now_s: float
    ) -> Handoff | None:
        """What has ended of a handoff for D; None: it may ask, as after a delivery that failed.

        ``again``: it says a demand once more. Raises `HandoffOwnedError`.
        """
        part = self._ledger.part_of(handoff, engine)
        if handoff.ended and handoff.shared and part is handoff:
            return self._ledger.readers.late(handoff, engine, now_s)
        over = handoff.ended or again or is_served(part)
        return part if part.ended and over else None

    def _ask(
        self, handoff: Handoff, engine: EngineRecord, wish: Wish, now_s: float, began_s: float
    ) -> Handoff | None:
        """What has asked now, the handoff or a delivery of it; None: it was said again."""
        readers, part = self._ledger.readers, self._ledger.part_of(handoff, engine)
        if handoff.shared and handoff.source is None and wish.prefix is not None:
            raise waited_for(handoff.handoff_id, engine)
        shared = handoff.shared or (wish.readers > 0 and handoff.destination is None)
        begins = shared and (part is handoff or part.ended)
        if begins:
            part = readers.begin(handoff, engine, now_s)
        try:
            if part.destination is None and not wish.repeated:
                engine.check_takes(handoff.handoff_id, began_s)
            if engine.in_use is None:
                engine.in_use = self._in_use(engine)
            first = part.ask(engine, wish, now_s)
        except RestowError:
            if begins:
                readers.drop(part)
            raise
        if begins:
            readers.keep(part, engine)
            readers.name(handoff, wish.readers)
        engine.handoffs.add(part.number)
        return part if first else None

    def _in_use(self, engine: EngineRecord) -> PagesInUse:
        """What is in use of an engine that has its first demand: what it has published."""
        in_use = PagesInUse(engine, engine.account)
        for one in map(self._ledger.by_number.get, engine.handoffs):
            if one is not None and one.source is engine and one.parent is None:
                in_use.publish(one.side, one.handoff_id, one.publication.blocks)
        return in_use

    def decline(
        self,
        engine: EngineRecord,
        handoff_id: str,
        detail: str,
        now_s: float,
        demand: int = 0,
        readers: int = 0,
    ) -> list[Action]:
        """D goes on without the state: P's pages are free at once, or will be when it publishes.

        ``demand`` is the number of D's message. Of several ``readers`` it is one that needs none.
        Raises `HandoffOwnedError` if another engine is D, `HandoffConflictError` if too many
        messages have asked, and what `Ledger.make` raises.
        """
        engine.check_there()
        known = self._ledger.hear(engine, handoff_id, now_s)
        if known is not None:
            known.check_destination(engine)
            if over := self._over(known, engine, False, now_s):
                return self._told_again(over, engine, demand)
        handoff = known or self._ledger.make(engine.key.tenant, handoff_id, now_s)
        part = self._ledger.part_of(handoff, engine)
        shared = handoff.shared or (readers > 0 and handoff.destination is None)
        if shared and (part is handoff or part.ended):
            part = self._ledger.readers.begin(handoff, engine, now_s)
            part.destination = engine
            self._ledger.readers.keep(part, engine)
            self._ledger.readers.name(handoff, readers)
        elif part.destination is None:
            part.destination = engine
        part.add_demand_message(engine, demand)
        words = f"engine {engine.key.engine_id} does without" + (f": {detail}" if detail else "")
        return self._ledger.stop(part, Failure(State.CANCELLED, "DECLINED", words), now_s)

    def _told_again(self, handoff: Handoff, engine: EngineRecord, number: int) -> list[Action]:
        """How an ended handoff ended, for D or who asks late by message ``number``; or it is later.

        Raises `HandoffConflictError` as `decline` does.
        """
        if engine is not handoff.destination and handoff.destination is not None:
            return []
        if handoff.number not in engine.quarantined:
            # A broken stream may have lost the token, too.
            return [*handoff.tell_sampled_to(number), told(handoff, engine, number)]
        handoff.add_demand_message(engine, number)
        return []


def revision_changed(engine: EngineRecord) -> Failure:
    """Say that an engine's side of a handoff is of weights that it has no longer."""
    words = (
        f"the weights of engine {engine.key.engine_id} were replaced meanwhile: it computes with "
        f"revision {engine.revision!r} now"
    )
    return Failure(State.FAILED, "REVISION_CHANGED", words)
