"""Publications that readers are named for: how their deliveries begin, and what their ends do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from restow.broker.core.actions import Action, State
from restow.broker.core.engines.account import Account, handoff_bytes
from restow.broker.core.engines.engine import EngineRecord
from restow.broker.core.events import Failure
from restow.broker.core.handoffs.conflicts import named_late, no_place
from restow.broker.core.handoffs.handoff import Handoff
from restow.broker.core.handoffs.sides.demand import NO_DEMAND
from restow.broker.core.handoffs.sides.demand_messages import DemandMessages

if TYPE_CHECKING:
    from restow.broker.core.ledger.ledger import Ledger

SERVED = "HANDOFF_OWNED"
"""How a delivery ends that no reader's place was left for."""


class Readers:
    """Begins deliveries in a ledger, and sees to what they belong to when they end."""

    def __init__(self, ledger: Ledger) -> None:
        """Serve ``ledger``."""
        self._ledger = ledger

    def share(self, handoff: Handoff, readers: int, now_s: float) -> None:
        """Have a handoff that P has not published whole be for ``readers``.

        A demand that it has becomes a delivery. Raises `HandoffConflictError` once that reads, and
        what `Ledger.check_room` and `Account.keep` raise; then nothing changed.
        """
        if handoff.publication.final:
            return
        if handoff.granted or handoff.early_tokens:
            raise named_late(handoff.handoff_id)
        engine = handoff.destination
        if engine is not None:
            made = self._new(handoff, now_s)
            made.destination, handoff.destination = engine, None
            made.demand, handoff.demand = handoff.demand, NO_DEMAND
            made.asked_s = handoff.asked_s
            made.demand_messages, handoff.demand_messages = (
                handoff.demand_messages,
                DemandMessages(),
            )
            made.asked_again = handoff.asked_again
            made.offer, handoff.offer = handoff.offer, None
            made.unheard, handoff.unheard = handoff.unheard, set()
            made.dst_checked = handoff.dst_checked
            if engine.in_use is not None:
                engine.in_use.move(handoff, made)
            made.lease.patience_until_s = handoff.lease.patience_until_s
            made.timeline.note(now_s, "requested", made.demand.held_tokens)
            handoff.lease.forget_demand()
            if engine is not handoff.source:
                engine.handoffs.discard(handoff.number)
            self.keep(made, engine)
        self.name(handoff, readers)

    def name(self, handoff: Handoff, readers: int) -> None:
        """Take the word of a side for how many readers there are: P's counts, if it says any."""
        if not handoff.publication.readers:
            handoff.deliveries.readers = max(handoff.deliveries.readers, readers)

    def _new(self, handoff: Handoff, now_s: float) -> Handoff:
        self._ledger.check_room(handoff.tenant)
        self._account(handoff).keep(handoff_bytes(handoff.handoff_id))
        return self._of(handoff, now_s)

    def _of(self, handoff: Handoff, now_s: float) -> Handoff:
        number = self._ledger.numbering.take(now_s)
        made = Handoff(
            number, handoff.tenant, handoff.handoff_id, now_s, parent=handoff, side=handoff.side
        )
        made.lease.until_s = handoff.lease.until_s
        made.trace_parent = handoff.trace_parent
        return made

    def _account(self, handoff: Handoff) -> Account:
        return self._ledger.tenants.account(handoff.tenant)

    def begin(self, handoff: Handoff, engine: EngineRecord, now_s: float) -> Handoff:
        """A delivery for a D that has none: `keep` files it once it has asked, `drop` forgets it.

        Raises `HandoffOwnedError`, and what `Ledger.check_room` and `Account.keep` raise.
        """
        deliveries = handoff.deliveries
        if deliveries.served or not deliveries.has_room():
            raise no_place(handoff.handoff_id, deliveries.in_words(), engine)
        return self._new(handoff, now_s)

    def drop(self, delivery: Handoff) -> None:
        """Forget a delivery whose demand was refused."""
        self._account(delivery).let_go(handoff_bytes(delivery.handoff_id))

    def keep(self, delivery: Handoff, engine: EngineRecord) -> None:
        """File a delivery that ``engine`` has asked for."""
        ledger, parent = self._ledger, delivery.parent
        if parent is None:
            return
        ledger.tenants.add_live(delivery.tenant, 1)
        ledger.by_number[delivery.number] = delivery
        engine.handoffs.add(delivery.number)
        if parent.source is not None:
            parent.source.handoffs.add(delivery.number)
        parent.deliveries.by_engine.pop(engine.key, None)
        parent.deliveries.by_engine[engine.key] = delivery
        parent.lease.unasked_until_s = 0.0
        parent.timeline.note_often(delivery.born_s, "asked for", engine.key.engine_id)

    def late(self, handoff: Handoff, engine: EngineRecord, now_s: float) -> Handoff:
        """What a D is told that asks when the publication has ended.

        Raises `HandoffOwnedError` where all readers have it: to that D it is not DONE.
        """
        if handoff.state is State.DONE or not handoff.deliveries.has_room():
            raise no_place(handoff.handoff_id, handoff.deliveries.in_words(), engine)
        made = self._of(handoff, now_s)
        made.state, made.failure, made.ended, made.ended_s = (
            handoff.state,
            handoff.failure,
            True,
            handoff.ended_s,
        )
        handoff.deliveries.by_engine[engine.key] = made
        return made

    def end_all(self, handoff: Handoff, now_s: float) -> list[Action]:
        """The publication ends: its deliveries end with it, as it does."""
        actions: list[Action] = []
        failure = handoff.failure
        if failure is None:
            words = f"no reader's place was left: {handoff.deliveries.in_words()}"
            failure = Failure(State.FAILED, SERVED, words)
        for one in handoff.deliveries:
            actions += self._ledger.stop(one, failure, now_s)
        return actions

    def ended(self, delivery: Handoff, now_s: float) -> list[Action]:
        """A delivery has ended: the publication may end, or wait for other readers."""
        parent, engine = delivery.parent, delivery.destination
        if parent is None:
            return []
        parent.deliveries.count(delivery)
        parent.bytes_read += delivery.bytes_read
        name = "" if engine is None else engine.key.engine_id
        failure = delivery.failure
        what = "delivered" if failure is None else f"not delivered, {failure.reason}"
        parent.timeline.note_often(now_s, what, name)
        if parent.ended:
            return []
        if parent.deliveries.served:
            return self.end_served(parent, now_s)
        self.place_left(parent)
        # A publication that P has not said to this broker has no lease that would end it.
        if failure is not None or parent.source is None:
            self._ledger.wait_for_demand(parent, now_s)
        self._ledger.watch(parent)
        return []

    def place_left(self, parent: Handoff) -> None:
        """A delivery reads no more: one of those that waited for a place may."""
        self._ledger.returned.update(one.number for one in parent.deliveries if not one.granted)

    def end_served(self, handoff: Handoff, now_s: float) -> list[Action]:
        """Every reader of a publication has it, or does without."""
        if not handoff.deliveries.done:
            words = f"all {handoff.deliveries.readers} readers do without"
            handoff.fail(Failure(State.CANCELLED, "DECLINED", words), now_s)
        return self._ledger.end(handoff, now_s)
