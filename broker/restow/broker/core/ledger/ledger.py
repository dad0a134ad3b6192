"""Publications that readers are named for: how their deliveries begin, and what their ends do."""

from __future__ import annotations

import math

from restow.broker.core.common.actions import Action, SendUnfence, TellEnded
from restow.broker.core.common.events import Failure
from restow.broker.core.common.keys import State
from restow.broker.core.common.limits import Limits
from restow.broker.core.common.pair import Checks
from restow.broker.core.engines.account import Account, handoff_bytes
from restow.broker.core.engines.engine import EngineRecord
from restow.broker.core.engines.flow import Flow
from restow.broker.core.handoffs.demand import NO_DEMAND, DemandMessages, is_compared
from restow.broker.core.handoffs.grant import release_staging
from restow.broker.core.handoffs.handoff import Handoff, named_late, no_place
from restow.broker.core.ledger.ends import end_of, pair_ids, told, told_destination
from restow.broker.core.ledger.statistics import Statistics
from restow.broker.core.ledger.table import Deadlines, Table
from restow.broker.errors import HandoffUnknownError
from restow.broker.reasons import ORDINARY

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


"""Reasons of ends that somebody wanted."""
TOO_SLOW = frozenset({"READ_DEADLINE", "GRANT_OUTLIVED"})
"""Reasons of reads that did not end inside their grant."""


class Ledger(Table):
    """All handoffs, and how they go on. `EngineRecord.handoffs` has those of an engine."""

    def __init__(self, limits: Limits, first_us: int) -> None:
        """Start empty; the numbers of handoffs begin at ``first_us``."""
        super().__init__(limits, first_us)
        self.statistics = Statistics()
        self.returned: set[int] = set()
        """Numbers of handoffs that are to be granted again, at the next tick."""
        self.fresh_ends: list[Handoff] | None = None
        """What ended since somebody looked; None: nobody looks."""
        self.fresh_failures: list[tuple[Handoff, Failure]] | None = None
        """What failed since somebody looked, ended by it or not; None: nobody looks."""
        self.bytes_read = self.early_bytes = 0
        self.checks = Checks()
        self.deadlines = Deadlines()
        self.flow = Flow()
        self.readers = Readers(self)

    def hear(self, engine: EngineRecord, handoff_id: str, now_s: float) -> Handoff | None:
        """The same, of which the engine says a word."""
        handoff = self.look_up(engine, handoff_id)
        if handoff is not None:
            for one in (handoff, handoff.deliveries.by_engine.get(engine.key)):
                if one is not None and one.ended:
                    self._take_back(one, engine, now_s)
        return handoff

    def part_of(self, handoff: Handoff, engine: EngineRecord) -> Handoff:
        """The delivery of a D that has asked, live or ended; else the handoff itself."""
        found = handoff.deliveries.by_engine.get(engine.key)
        if found is not None and found.destination in (engine, None):
            return found
        return handoff

    def _take_back(self, handoff: Handoff, engine: EngineRecord, now_s: float) -> None:
        """Give an ended handoff back to an engine that was forgotten and has registered again.

        What was known of D's ranks is forgotten, too: each may write until its agent says Hello.
        """
        if handoff.source is not engine and engine.is_life_of(handoff.source):
            handoff.side.engine = engine
        if handoff.destination is not engine and engine.is_life_of(handoff.destination):
            handoff.destination = engine
            self.quarantine.hold(handoff, engine, engine.unheard_ranks, now_s)

    def find_of(self, engine: EngineRecord, handoff_id: str, now_s: float) -> Handoff:
        """The handoff, live or ended, that the engine has a side of.

        Raises `HandoffUnknownError`.
        """
        handoff = self.hear(engine, handoff_id, now_s)
        if handoff is not None and engine is not handoff.source:
            handoff = self.part_of(handoff, engine)
        if handoff is None or (engine is not handoff.source and engine is not handoff.destination):
            raise HandoffUnknownError(
                f"engine {engine.key.engine_id} has no handoff {handoff_id}", handoff=handoff_id
            )
        return handoff

    def watch(self, handoff: Handoff) -> None:
        """Have the clock look at it in time."""
        look_s = handoff.next_look_s()
        if look_s < handoff.looked_s:
            handoff.looked_s = look_s
            self.deadlines.add(look_s, handoff.number)

    def due(self, now_s: float) -> list[Handoff]:
        """The live handoffs that run out of time now."""
        found: dict[int, Handoff] = {}
        for number in self.deadlines.due(now_s):
            handoff = self.by_number.get(number)
            if handoff is None:
                continue
            handoff.looked_s = math.inf
            if handoff.next_look_s() > now_s:
                self.watch(handoff)
            else:
                found[number] = handoff
        return list(found.values())

    def stop(self, handoff: Handoff, failure: Failure, now_s: float) -> list[Action]:
        """End a handoff that broke.

        An early read that took too long ends nothing: D reads the rest when P has computed it.
        """
        if handoff.part_tokens and failure.reason in TOO_SLOW and not handoff.given_back:
            handoff.whole_only = True
            return self._give_up_part(handoff, failure, now_s)
        handoff.fail(failure, now_s)
        return self.end(handoff, now_s)

    def _give_up_part(self, handoff: Handoff, failure: Failure, now_s: float) -> list[Action]:
        """Give back the grant of an early read, of which nothing is used.

        A rank that has not settled is waited for until P's lease or D's patience ends.
        """
        handoff.lease.settle_until_s = 0.0
        actions = self.give_back(handoff, failure, now_s)
        self.watch(handoff)
        if handoff.parent is not None:  # it had time as long as this one might read
            self.watch(handoff.parent)
        return actions

    def take_back(self, whole: Handoff, now_s: float) -> list[Action]:
        """Use nothing that was read early: P has taken back what it had published."""
        words = "P has preempted the prompt: all of it is read when P has computed it again"
        actions: list[Action] = []
        for handoff in (whole, *whole.deliveries):
            if handoff.ended:
                continue
            handoff.forget_early()
            handoff.timeline.note(now_s, "taken back", words)
            if handoff.part_tokens and not handoff.given_back:
                failure = Failure(State.FAILED, "TAKEN_BACK", words)
                actions += self._give_up_part(handoff, failure, now_s)
        return actions

    def give_back(self, handoff: Handoff, failure: Failure, now_s: float) -> list[Action]:
        """The grant can't be used, and nothing is lost: it is given anew.

        Not before every rank that may be reading has settled: what it writes late would spoil what
        is read anew.
        """
        handoff.fail(failure, now_s)
        handoff.given_back = True
        return self.go_back(handoff, now_s)

    def go_back(self, handoff: Handoff, now_s: float) -> list[Action]:
        """Make a handoff READY whose grant is given back, if no rank reads any more."""
        handoff.forget_untold()
        if handoff.unsettled:
            return []
        actions = self._take_grant(handoff, now_s)
        handoff.timeline.note(now_s, "given back")
        self.returned.add(handoff.number)
        return actions

    def end_part(self, handoff: Handoff, now_s: float) -> list[Action]:
        """What was to be read early is read: it waits for what is left."""
        handoff.keep_part()
        actions = self._take_grant(handoff, now_s, done=True)
        handoff.timeline.note_often(now_s, "read early", handoff.early_tokens)
        return actions

    def _take_grant(self, handoff: Handoff, now_s: float, done: bool = False) -> list[Action]:
        """No rank reads any more; ``done``: all that was to be read is."""
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
            self.watch(handoff.parent)  # it had time as long as this one might read
        return actions

    def dismiss(self, handoff: Handoff, failure: Failure, now_s: float) -> list[Action]:
        """Refuse the demand of a handoff that is not granted; P's side stays as it was."""
        destination = handoff.destination
        # Where a rank may still write for a broker before this one, D must not hear of it yet.
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
        """Leave no trace of a live handoff and its deliveries: another broker goes on with it."""
        for one in (*handoff.deliveries, handoff):
            one.forget_untold()
            one.ended = True
            self._leave_flow(one, now_s)
            del self.by_number[one.number]
            self.returned.discard(one.number)
            for engine in (one.source, one.destination):
                if engine is not None:
                    engine.handoffs.discard(one.number)
            one.forget_blocks()
            self.tenants.account(one.tenant).let_go(handoff_bytes(one.handoff_id))
            self.tenants.add_live(one.tenant, -1)
        del self.live[handoff.tenant, handoff.handoff_id]

    def _leave_flow(self, handoff: Handoff, now_s: float, done: bool = False) -> None:
        if handoff.destination is not None:
            done = done or handoff.state is State.DONE
            self.flow.leave(handoff.destination.key, handoff.number, now_s, done)

    def wait_for_demand(self, handoff: Handoff, now_s: float) -> None:
        """Keep a handoff that nobody asks for no longer than that is waited for."""
        if handoff.destination is not None or any(handoff.deliveries):
            return
        if handoff.lease.wait_for_demand(self.limits, now_s):
            self.watch(handoff)

    def end(self, handoff: Handoff, now_s: float) -> list[Action]:
        """The one way to an end: tell both sides, give staging back, keep the story.

        D is told later while a rank of its may still write.
        """
        failure = handoff.failure
        handoff.forget_untold()
        handoff.ended = True
        handoff.ended_s = now_s
        handoff.state = State.DONE if failure is None else failure.state
        actions = self.readers.end_all(handoff, now_s)
        actions += release_staging(handoff)
        self._leave_flow(handoff, now_s)
        if handoff.pair is not None and handoff.pair.hashed:
            if failure is None:
                handoff.timeline.note(now_s, "checked", "what D read is what P hashed before")
            for checks in (self.checks, self.tenants.of(handoff.tenant).checks):
                checks.count(handoff.state, failure)
        handoff.timeline.note(now_s, "ended", handoff.state)
        del self.by_number[handoff.number]
        self.returned.discard(handoff.number)
        if handoff.parent is None:
            actions += _unfence(handoff)
            self.remember(handoff)
        self._count(handoff, now_s)
        writing = handoff.unsettled | handoff.unheard
        source, destination = handoff.source, handoff.destination
        if source is not None:
            source.handoffs.discard(handoff.number)
            if handoff.parent is None:
                actions.append(told(handoff, source))
        if destination is not None:
            destination.handoffs.discard(handoff.number)
            if not self.quarantine.hold(handoff, destination, writing, now_s):
                actions += told_destination(handoff, destination)
        handoff.forget_blocks()
        self.tenants.account(handoff.tenant).let_go(handoff_bytes(handoff.handoff_id))
        if self.fresh_ends is not None:
            self.fresh_ends.append(handoff)
        if failure is not None and failure.reason not in ORDINARY:
            self._tell_failure(handoff, failure)
        return actions + self.readers.ended(handoff, now_s)

    def _count(self, handoff: Handoff, now_s: float) -> None:
        """Count a delivery's end; or a publication's by itself, whose deliveries were counted."""
        self.tenants.add_live(handoff.tenant, -1)
        if handoff.shared:
            self.statistics.count_publication(handoff)
            return
        end = end_of(handoff)
        self.tenants.count_end(handoff.tenant, end, pair_ids(handoff), now_s)
        self.statistics.count(handoff, end)
        self.bytes_read += handoff.bytes_read
        self.early_bytes += handoff.early_bytes

    def _tell_failure(self, handoff: Handoff, failure: Failure) -> None:
        if self.fresh_failures is not None:
            self.fresh_failures.append((handoff, failure))


def _unfence(handoff: Handoff) -> list[Action]:
    """Have P's agents forget its fences; one that is away is told when it says them again."""
    source = handoff.source
    if source is None:
        return []
    return [
        SendUnfence(source.agents[rank].key, handoff.handoff_id)
        for rank in sorted(handoff.fenced)
        if rank in source.agents
    ]
