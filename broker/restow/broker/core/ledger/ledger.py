"""The ledger: all handoffs, revoked grants, the end of each handoff, shared deliveries."""

from __future__ import annotations

import math

from restow.broker.core.common.actions import Action, SendUnfence, TellEnded
from restow.broker.core.common.events import Failure
from restow.broker.core.common.keys import State
from restow.broker.core.common.limits import Limits
from restow.broker.core.common.pair import Checks
from restow.broker.core.common.traffic import count_end
from restow.broker.core.engines.account import HANDOFF_BYTES
from restow.broker.core.engines.engine import EngineRecord
from restow.broker.core.engines.flow import Flow
from restow.broker.core.handoffs.demand import NO_DEMAND, DemandMessages, is_compared
from restow.broker.core.handoffs.grant import release_staging
from restow.broker.core.handoffs.handoff import Handoff, named_late, no_place
from restow.broker.core.ledger.ends import told
from restow.broker.core.ledger.handoff_table import Deadlines, HandoffTable
from restow.broker.core.ledger.statistics import Statistics
from restow.broker.errors import HandoffUnknownError
from restow.broker.reasons import ORDINARY

SERVED = "HANDOFF_OWNED"
"""The reason of a delivery that found no reader's place."""


class Readers:
    """Starts the deliveries of publications with several readers, and handles their ends."""

    def __init__(self, ledger: Ledger) -> None:
        """Serve ``ledger``."""
        self._ledger = ledger

    def share(self, handoff: Handoff, readers: int, now_s: float) -> None:
        """Turn a handoff that P has not published whole into a publication for ``readers``.

        An existing demand becomes a delivery. Raises `HandoffConflictError` if that delivery
        already reads, and what `Ledger.check_room` and `Account.keep` raise; in any case nothing
        changes.
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
        """Set the number of readers that a side names; P's number takes precedence."""
        if not handoff.publication.readers:
            handoff.deliveries.readers = max(handoff.deliveries.readers, readers)

    def _new(self, handoff: Handoff, now_s: float) -> Handoff:
        self._ledger.check_room(handoff.tenant)
        handoff.account.keep(HANDOFF_BYTES)
        return self._of(handoff, now_s)

    def _of(self, handoff: Handoff, now_s: float) -> Handoff:
        made = Handoff(
            self._ledger.numbering.take(now_s),
            handoff.tenant,
            handoff.handoff_id,
            now_s,
            handoff.account,
            parent=handoff,
            side=handoff.side,
        )
        made.lease.until_s = handoff.lease.until_s
        made.trace_parent = handoff.trace_parent
        return made

    def begin(self, handoff: Handoff, engine: EngineRecord, now_s: float) -> Handoff:
        """Create a delivery for a D that has none; then call `keep` or `drop`.

        Raises `HandoffOwnedError`, and what `Ledger.check_room` and `Account.keep` raise.
        """
        deliveries = handoff.deliveries
        if deliveries.served or not deliveries.has_room():
            raise no_place(handoff.handoff_id, deliveries.in_words(), engine)
        return self._new(handoff, now_s)

    def drop(self, delivery: Handoff) -> None:
        """Forget a delivery whose demand was refused."""
        delivery.account.let_go(HANDOFF_BYTES)

    def keep(self, delivery: Handoff, engine: EngineRecord) -> None:
        """File a delivery that ``engine`` has asked for."""
        ledger, parent = self._ledger, delivery.parent
        if parent is None:
            return
        ledger.tenants.add(delivery.tenant, live=1)
        ledger.by_number[delivery.number] = delivery
        engine.handoffs.add(delivery.number)
        if parent.source is not None:
            parent.source.handoffs.add(delivery.number)
        parent.deliveries.by_engine.pop(engine.key, None)
        parent.deliveries.by_engine[engine.key] = delivery
        parent.lease.unasked_until_s = 0.0
        parent.timeline.note_often(delivery.born_s, "asked for", engine.key.engine_id)

    def late(self, handoff: Handoff, engine: EngineRecord, now_s: float) -> Handoff:
        """Return an ended delivery for a D that asks after the publication has ended.

        Raises `HandoffOwnedError` if all readers have the state, because this D does not have it.
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
        return made

    def end_all(self, handoff: Handoff, now_s: float) -> list[Action]:
        """End the deliveries of a publication that ends, with its failure."""
        actions: list[Action] = []
        failure = handoff.failure
        if failure is None:
            words = f"no reader's place was left: {handoff.deliveries.in_words()}"
            failure = Failure(State.FAILED, SERVED, words)
        for delivery in handoff.deliveries:
            actions += self._ledger.stop(delivery, failure, now_s)
        return actions

    def ended(self, delivery: Handoff, now_s: float) -> list[Action]:
        """Handle the end of a delivery: the publication may end, or wait for other readers."""
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
        # If P has not yet published to this broker, no lease would end the publication.
        if failure is not None or parent.source is None:
            self._ledger.wait_for_demand(parent, now_s)
        self._ledger.watch(parent)
        return []

    def place_left(self, parent: Handoff) -> None:
        """Let a delivery that waited for a reader's place try again."""
        self._ledger.returned.update(delivery.number for delivery in parent.deliveries)

    def end_served(self, handoff: Handoff, now_s: float) -> list[Action]:
        """End a publication whose readers all have the state or do without."""
        if not handoff.deliveries.done:
            words = f"all {handoff.deliveries.readers} readers do without"
            handoff.fail(Failure(State.CANCELLED, "DECLINED", words), now_s)
        return self._ledger.end(handoff, now_s)


TOO_SLOW = frozenset({"READ_DEADLINE", "GRANT_OUTLIVED"})
"""Reasons of reads that did not finish inside their grant."""


class Ledger(HandoffTable):
    """All handoffs and their progress. `EngineRecord.handoffs` has the numbers of an engine's."""

    def __init__(self, limits: Limits, first_us: int) -> None:
        """Start empty; the numbers of handoffs begin at ``first_us``."""
        super().__init__(limits, first_us)
        self.statistics = Statistics()
        self.returned: set[int] = set()
        """Numbers of handoffs to grant again at the next tick."""
        self.fresh_ends: list[Handoff] | None = None
        """Handoffs that ended since the last query; None if nobody queries."""
        self.fresh_failures: list[tuple[Handoff, Failure]] | None = None
        """Failures since the last query, whether or not they ended the handoff; None if nobody
        queries."""
        self.checks = Checks()
        self.deadlines = Deadlines()
        self.flow = Flow()
        self.readers = Readers(self)

    def hear(self, engine: EngineRecord, handoff_id: str, now_s: float) -> Handoff | None:
        """Return the handoff that an engine speaks of; give it back to a re-registered engine."""
        key = (engine.key.tenant, handoff_id)
        handoff = self.live.get(key)
        if handoff is not None and not handoff.deliveries.by_engine:
            return handoff
        handoff = handoff or self.ended.get(key)
        if handoff is not None:
            for part in (handoff, handoff.deliveries.by_engine.get(engine.key)):
                if part is not None and part.ended:
                    self._take_back(part, engine, now_s)
        return handoff

    def part_of(self, handoff: Handoff, engine: EngineRecord) -> Handoff:
        """Return the delivery of a D that has asked, live or ended; else the handoff itself."""
        delivery = handoff.deliveries.by_engine.get(engine.key)
        if delivery is not None and delivery.destination in (engine, None):
            return delivery
        return handoff

    def _take_back(self, handoff: Handoff, engine: EngineRecord, now_s: float) -> None:
        """Give an ended handoff back to an engine that was forgotten and has registered again.

        The state of D's ranks was forgotten too: each rank may write until its agent says Hello.
        """
        if handoff.source is not engine and engine.is_life_of(handoff.source):
            handoff.side.engine = engine
        if handoff.destination is not engine and engine.is_life_of(handoff.destination):
            handoff.destination = engine
            self.quarantine.hold(handoff, engine, engine.unheard_ranks, now_s)

    def find_of(self, engine: EngineRecord, handoff_id: str, now_s: float) -> Handoff:
        """Return the live or ended handoff in which the engine has a side.

        Raises `HandoffUnknownError`.
        """
        handoff = self.hear(engine, handoff_id, now_s)
        if handoff is not None and engine is not handoff.source:
            handoff = self.part_of(handoff, engine)
        if handoff is None or (engine is not handoff.source and engine is not handoff.destination):
            raise HandoffUnknownError(
                f"engine {engine.key.engine_id} has no side of handoff {handoff_id}: it ended long "
                f"ago, or the id is wrong",
                handoff=handoff_id,
            )
        return handoff

    def watch(self, handoff: Handoff) -> None:
        """Set a deadline for the handoff's next check by the clock."""
        lease, deliveries = handoff.lease, handoff.deliveries.by_engine
        look_s = handoff.next_look_s() if deliveries else lease.next_look_s()
        if look_s < handoff.looked_s:
            handoff.looked_s = look_s
            self.deadlines.add(look_s, handoff.number)

    def due(self, now_s: float) -> list[Handoff]:
        """Return the live handoffs whose deadline has passed."""
        handoffs: dict[int, Handoff] = {}
        for number in self.deadlines.due(now_s):
            handoff = self.by_number.get(number)
            if handoff is None:
                continue
            handoff.looked_s = math.inf
            if handoff.next_look_s() > now_s:
                self.watch(handoff)
            else:
                handoffs[number] = handoff
        return list(handoffs.values())

    def stop(self, handoff: Handoff, failure: Failure, now_s: float) -> list[Action]:
        """End a handoff that failed.

        A read that took too long ends nothing while there is time for another: D reads again, or
        after an early read all of it when P has computed it.
        """
        if failure.reason in TOO_SLOW and handoff.granted and not handoff.given_back:
            if handoff.part_tokens:
                handoff.whole_only = True
                return self._give_up_read(handoff, failure, now_s)
            if handoff.lease.reads_again(self.limits, now_s):
                return self._give_up_read(handoff, failure, now_s)
        handoff.fail(failure, now_s)
        return self.end(handoff, now_s)

    def _give_up_read(self, handoff: Handoff, failure: Failure, now_s: float) -> list[Action]:
        """Revoke the grant of a read whose result is not used.

        The broker waits for ranks that have not settled until P's lease or D's timeout ends.
        """
        handoff.lease.settle_until_s = 0.0
        actions = self.give_back(handoff, failure, now_s)
        self.watch(handoff)
        if handoff.parent is not None:  # the parent has no deadline while a delivery may read
            self.watch(handoff.parent)
        return actions

    def take_back(self, whole: Handoff, now_s: float) -> list[Action]:
        """Discard what was read early, because P withdrew its publication."""
        words = "P preempted the prompt: D reads all of it when P has computed it again"
        actions: list[Action] = []
        for handoff in (whole, *whole.deliveries):
            if handoff.ended:
                continue
            handoff.forget_early()
            handoff.timeline.note(now_s, "taken back", words)
            if handoff.part_tokens and not handoff.given_back:
                failure = Failure(State.FAILED, "TAKEN_BACK", words)
                actions += self._give_up_read(handoff, failure, now_s)
        return actions

    def give_back(self, handoff: Handoff, failure: Failure, now_s: float) -> list[Action]:
        """Revoke a grant that cannot be used, so that the handoff is granted again without loss.

        The new grant waits until every rank that may be reading has settled, because late writes
        would corrupt what is read anew.
        """
        handoff.fail(failure, now_s)
        handoff.given_back = True
        return self.go_back(handoff, now_s)

    def go_back(self, handoff: Handoff, now_s: float) -> list[Action]:
        """Return a handoff with a revoked grant to READY if no rank reads any more."""
        handoff.forget_untold()
        if handoff.unsettled:
            return []
        actions = self._take_grant(handoff, now_s)
        handoff.timeline.note(now_s, "given back")
        self.returned.add(handoff.number)
        return actions

    def end_part(self, handoff: Handoff, now_s: float) -> list[Action]:
        """Finish an early read; the handoff then waits for the rest."""
        handoff.keep_part()
        actions = self._take_grant(handoff, now_s, done=True)
        handoff.timeline.note_often(now_s, "read early", handoff.early_tokens)
        return actions

    def _take_grant(self, handoff: Handoff, now_s: float, done: bool = False) -> list[Action]:
        """Drop the grant when no rank reads any more; ``done``: the read succeeded."""
        actions = release_staging(handoff)
        old = handoff.number
        self._leave_flow(handoff, now_s, done)
        del self.by_number[old]
        handoff.forget_grant(self.numbering.take(now_s))
        self.by_number[handoff.number] = handoff
        for engine in (handoff.source, handoff.destination):
            if engine is not None:
                engine.handoffs.discard(old)
                engine.handoffs.add(handoff.number)
        self.watch(handoff)
        if handoff.parent is not None:
            self.readers.place_left(handoff.parent)
            self.watch(handoff.parent)  # extended while this delivery could read
        return actions

    def dismiss(self, handoff: Handoff, failure: Failure, now_s: float) -> list[Action]:
        """Refuse the demand of a handoff without a grant; P's side stays as it was."""
        destination = handoff.destination
        # While a rank may still write for an earlier broker, D must not be told yet.
        lone = handoff.parent is not None
        if destination is None or handoff.source is None or handoff.unheard or lone:
            return self.stop(handoff, failure, now_s)
        if destination is not handoff.source:
            destination.handoffs.discard(handoff.number)
        self._leave_flow(handoff, now_s)
        self.statistics.refuse(failure.reason)
        name = destination.key.engine_id
        handoff.timeline.note_refused(now_s, name, failure.reason, failure.detail)
        self._tell_failure(handoff, failure)
        key, handoff_id = destination.key, handoff.handoff_id
        state, reason, detail = failure.state, failure.reason, failure.detail
        position = handoff.publication.position_tokens
        compared = is_compared(handoff.publication, handoff.demand)
        actions: list[Action] = [
            TellEnded(
                *(key, handoff_id, state, reason, detail, 0, 0, number),
                position=position,
                compared=compared,
            )
            for number in handoff.demand_messages.numbers
        ]
        handoff.forget_demand()
        self.wait_for_demand(handoff, now_s)
        return actions

    def forget(self, handoff: Handoff, now_s: float) -> None:
        """Remove all trace of a live handoff and its deliveries: another broker continues it."""
        for part in (*handoff.deliveries, handoff):
            part.forget_untold()
            part.ended = True
            self._leave_flow(part, now_s)
            del self.by_number[part.number]
            self.returned.discard(part.number)
            for engine in (part.source, part.destination):
                if engine is not None:
                    engine.handoffs.discard(part.number)
            part.forget_blocks()
            self.tenants.add(part.tenant, live=-1)
        del self.live[handoff.tenant, handoff.handoff_id]

    def _leave_flow(self, handoff: Handoff, now_s: float, done: bool = False) -> None:
        if handoff.destination is not None:
            done = done or handoff.state is State.DONE
            self.flow.leave(handoff.destination.key, handoff.number, now_s, done)

    def wait_for_demand(self, handoff: Handoff, now_s: float) -> None:
        """Limit how long a handoff without a demand is kept."""
        if handoff.destination is not None or any(handoff.deliveries):
            return
        if handoff.lease.wait_for_demand(self.limits, now_s):
            self.watch(handoff)

    def end(self, handoff: Handoff, now_s: float) -> list[Action]:
        """End a handoff: tell both sides, free staging, remember the timeline.

        Every end goes through this method. D is told later if a rank of D may still write.
        """
        failure = handoff.failure
        if handoff.state is State.STAGING:
            handoff.forget_untold()
        handoff.ended = True
        handoff.ended_s = now_s
        handoff.state = State.DONE if failure is None else failure.state
        actions: list[Action] = []
        if handoff.deliveries.by_engine:
            actions = self.readers.end_all(handoff, now_s)
        if handoff.stagers:
            actions += release_staging(handoff)
        source, destination = handoff.side.engine, handoff.destination
        if destination is not None:
            self.flow.leave(destination.key, handoff.number, now_s, failure is None)
        if handoff.pair is not None and handoff.pair.hashed:
            if failure is None:
                handoff.timeline.note(now_s, "checked", "D read what P hashed")
            for checks in (self.checks, self.tenants.of(handoff.tenant).checks):
                checks.count(handoff.state, failure)
        handoff.timeline.note(now_s, "ended", handoff.state)
        del self.by_number[handoff.number]
        self.returned.discard(handoff.number)
        if handoff.parent is None:
            agents = source.agents if source is not None else {}
            for rank in sorted(handoff.side.fenced):
                if rank in agents:  # an absent agent is told when it repeats its fence
                    actions.append(SendUnfence(agents[rank].key, handoff.handoff_id))
            self.remember(handoff)
        self._count(handoff, now_s)
        writing = handoff.unsettled | handoff.unheard
        if source is not None:
            source.handoffs.discard(handoff.number)
            if handoff.parent is None:
                actions.append(told(handoff, source))
        if destination is not None:
            destination.handoffs.discard(handoff.number)
            if not (writing and self.quarantine.hold(handoff, destination, writing, now_s)):
                for number in handoff.demand_messages.numbers:
                    actions.append(told(handoff, destination, number))
        handoff.forget_blocks()
        if self.fresh_ends is not None:
            self.fresh_ends.append(handoff)
        if failure is not None and failure.reason not in ORDINARY:
            self._tell_failure(handoff, failure)
        return actions if handoff.parent is None else actions + self.readers.ended(handoff, now_s)

    def _count(self, handoff: Handoff, now_s: float) -> None:
        """Count an end; a shared publication counts apart, because its deliveries were counted."""
        if handoff.deliveries.readers:
            self.tenants.add(handoff.tenant, live=-1)
            self.statistics.count_publication(handoff)
            return
        source, destination = handoff.side.engine, handoff.destination
        pair = None
        if source is not None and destination is not None:
            pair = source.key.engine_id, destination.key.engine_id
        state, bytes_read = handoff.state, handoff.bytes_read
        series = self.tenants.count_end(handoff.tenant, state, bytes_read, pair)
        series.append(self.statistics.series)
        took_s = now_s - handoff.granted_s if handoff.granted_s else None
        count_end(series, state, bytes_read, took_s, now_s)
        self.statistics.count(handoff)

    def _tell_failure(self, handoff: Handoff, failure: Failure) -> None:
        if self.fresh_failures is not None:
            self.fresh_failures.append((handoff, failure))
