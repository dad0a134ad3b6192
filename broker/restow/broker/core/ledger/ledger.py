"""The ledger: every handoff, live and ended, and the one way in which they end."""

from __future__ import annotations

import math
from collections import OrderedDict

from restow.broker.core.actions import Action, SendUnfence, State, TellEnded
from restow.broker.core.engines.account import handoff_bytes
from restow.broker.core.engines.engine import EngineRecord
from restow.broker.core.engines.flow import Flow
from restow.broker.core.engines.tenants import Tenants
from restow.broker.core.events import Failure
from restow.broker.core.handoffs.digests import Checks
from restow.broker.core.handoffs.grant import release_staging
from restow.broker.core.handoffs.handoff import Handoff
from restow.broker.core.ledger.deadlines import Deadlines
from restow.broker.core.ledger.ends import end_of, pair_ids, told, told_destination
from restow.broker.core.ledger.quarantine import Quarantine
from restow.broker.core.ledger.statistics import Statistics
from restow.broker.core.limits import Limits
from restow.broker.core.numbering import Numbering
from restow.broker.errors import DirectoryFullError, HandoffUnknownError, RequestError

MAX_ID_LENGTH = 256
GIVEN_UP = frozenset({"CANCELLED", "DECLINED", "RELEASED"})
"""Reasons of ends that somebody wanted."""


def check_handoff_id(handoff_id: str) -> None:
    """Raise `RequestError` for what no handoff can be called."""
    if not 0 < len(handoff_id) <= MAX_ID_LENGTH or not handoff_id.isprintable():
        raise RequestError(
            f"handoff_id {handoff_id[:64]!r} must have 1 to {MAX_ID_LENGTH} printable characters",
            field="handoff_id",
        )


class Ledger:
    """Handoffs by id and by number. `EngineRecord.handoffs` has those of an engine."""

    def __init__(self, limits: Limits, first_us: int) -> None:
        """Start empty; the numbers of handoffs begin at ``first_us``."""
        self.limits = limits
        self.live: dict[tuple[str, str], Handoff] = {}
        self.by_number: dict[int, Handoff] = {}
        self.ended: OrderedDict[tuple[str, str], Handoff] = OrderedDict()
        self.statistics = Statistics()
        self.returned: set[int] = set()
        """Numbers of handoffs that are to be granted again, at the next tick."""
        self.fresh_ends: list[Handoff] | None = None
        """What ended since somebody looked; None: nobody looks."""
        self.fresh_failures: list[tuple[Handoff, Failure]] | None = None
        """What failed since somebody looked, ended by it or not; None: nobody looks."""
        self.bytes_read = 0
        self.checks = Checks()
        self.deadlines = Deadlines()
        self.flow = Flow()
        self.tenants = Tenants(limits)
        self.quarantine = Quarantine(self.tenants)
        self._numbering = Numbering(first_us)

    def known(self, tenant: str, handoff_id: str) -> Handoff | None:
        """The handoff of that id, live or ended; None if there is none."""
        key = (tenant, handoff_id)
        return self.live.get(key) or self.ended.get(key)

    def find(self, tenant: str, handoff_id: str) -> Handoff:
        """Look a handoff up, live or ended. Raises `HandoffUnknownError`."""
        handoff = self.known(tenant, handoff_id)
        if handoff is None:
            raise HandoffUnknownError(f"handoff {handoff_id} is not known here", handoff=handoff_id)
        return handoff

    def look_up(self, engine: EngineRecord, handoff_id: str) -> Handoff | None:
        """The handoff of that id in the engine's tenant, live or ended."""
        return self.known(engine.key.tenant, handoff_id)

    def hear(self, engine: EngineRecord, handoff_id: str, now_s: float) -> Handoff | None:
        """The same, of which the engine says a word."""
        handoff = self.look_up(engine, handoff_id)
        if handoff is not None and handoff.ended:
            self._take_back(handoff, engine, now_s)
        return handoff

    def _take_back(self, handoff: Handoff, engine: EngineRecord, now_s: float) -> None:
        """Give an ended handoff back to an engine that was forgotten and has registered again.

        What was known of D's ranks is forgotten, too: each may write until its agent says Hello.
        """
        if handoff.source is not engine and engine.is_life_of(handoff.source):
            handoff.source = engine
        if handoff.destination is not engine and engine.is_life_of(handoff.destination):
            handoff.destination = engine
            self.quarantine.hold(handoff, engine, engine.unheard_ranks, now_s)

    def find_of(self, engine: EngineRecord, handoff_id: str, now_s: float) -> Handoff:
        """The handoff, live or ended, that the engine has a side of.

        Raises `HandoffUnknownError`.
        """
        handoff = self.hear(engine, handoff_id, now_s)
        if handoff is None or (engine is not handoff.source and engine is not handoff.destination):
            raise HandoffUnknownError(
                f"engine {engine.key.engine_id} has no handoff {handoff_id}", handoff=handoff_id
            )
        return handoff

    def make(self, tenant: str, handoff_id: str, now_s: float) -> Handoff:
        """Begin a handoff of an id that is not known.

        Raises `RequestError`, `QuotaExceededError` or `DirectoryFullError`.
        """
        check_handoff_id(handoff_id)
        self.tenants.check_handoff(tenant)
        if len(self.live) + len(self.quarantine) >= self.limits.max_live:
            raise DirectoryFullError(
                f"the broker holds {self.limits.max_live} handoffs, as many as it may: try again "
                f"later"
            )
        self.tenants.account(tenant).keep(handoff_bytes(handoff_id))
        number = self._numbering.take(now_s)
        handoff = Handoff(number, tenant, handoff_id, now_s)
        self.live[tenant, handoff_id] = handoff
        self.by_number[number] = handoff
        self.tenants.add_live(tenant, 1)
        return handoff

    def unmake(self, handoff: Handoff) -> None:
        """Leave no trace of a handoff whose first call was refused."""
        del self.live[handoff.tenant, handoff.handoff_id]
        del self.by_number[handoff.number]
        self.tenants.account(handoff.tenant).let_go(handoff_bytes(handoff.handoff_id))
        self.tenants.add_live(handoff.tenant, -1)

    def watch(self, handoff: Handoff) -> None:
        """Have the clock look at it in time."""
        look_s = handoff.lease.next_look_s()
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
            if handoff.lease.next_look_s() > now_s:
                self.watch(handoff)
            else:
                found[number] = handoff
        return list(found.values())

    def stop(self, handoff: Handoff, failure: Failure, now_s: float) -> list[Action]:
        """Something broke, and the handoff ends."""
        handoff.fail(failure, now_s)
        return self.end(handoff, now_s)

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
        actions = release_staging(handoff)
        old = handoff.number
        self._leave_flow(handoff, now_s)
        del self.by_number[old]
        handoff.forget_grant(self._numbering.take(now_s))
        self.by_number[handoff.number] = handoff
        for engine in (handoff.source, handoff.destination):
            if engine is not None:
                engine.handoffs.discard(old)
                engine.handoffs.add(handoff.number)
        handoff.timeline.note(now_s, "given back")
        self.returned.add(handoff.number)
        self.watch(handoff)
        return actions

    def dismiss(self, handoff: Handoff, failure: Failure, now_s: float) -> list[Action]:
        """Refuse the demand of a handoff that is not granted; P's side stays as it was."""
        destination = handoff.destination
        # Where a rank may still write for a broker before this one, D must not hear of it yet.
        if destination is None or handoff.source is None or handoff.unheard:
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
        actions: list[Action] = [
            TellEnded(key, handoff_id, state, reason, detail, 0, 0, number)
            for number in handoff.demand_messages.numbers
        ]
        handoff.forget_demand()
        self.wait_for_demand(handoff, now_s)
        return actions

    def _leave_flow(self, handoff: Handoff, now_s: float) -> None:
        if handoff.destination is not None:
            done = handoff.state is State.DONE
            self.flow.leave(handoff.destination.key, handoff.number, now_s, done)

    def wait_for_demand(self, handoff: Handoff, now_s: float) -> None:
        """Keep a handoff that nobody asks for no longer than that is waited for."""
        if handoff.destination is None and handoff.lease.wait_for_demand(self.limits, now_s):
            self.watch(handoff)

    def end(self, handoff: Handoff, now_s: float) -> list[Action]:
        """The one way to an end: tell both sides, give staging back, keep the story.

        D is told later while a rank of its may still write.
        """
        failure = handoff.failure
        handoff.forget_untold()
        actions = release_staging(handoff) + _unfence(handoff)
        handoff.state = State.DONE if failure is None else failure.state
        handoff.ended = True
        handoff.ended_s = now_s
        self._leave_flow(handoff, now_s)
        if handoff.pair is not None and handoff.pair.hashed:
            if failure is None:
                handoff.timeline.note(now_s, "checked", "what D read is what P hashed before")
            for checks in (self.checks, self.tenants.of(handoff.tenant).checks):
                checks.count(handoff.state, failure)
        handoff.timeline.note(now_s, "ended", handoff.state)
        key = (handoff.tenant, handoff.handoff_id)
        del self.live[key]
        del self.by_number[handoff.number]
        self.returned.discard(handoff.number)
        self.ended[key] = handoff
        end = end_of(handoff)
        forgotten = self.tenants.ended(*key, end, pair_ids(handoff), now_s)
        if forgotten is not None:
            del self.ended[handoff.tenant, forgotten]
        if len(self.ended) > self.limits.max_ended:
            (tenant, _), _ = self.ended.popitem(last=False)
            self.tenants.forget_oldest(tenant)
        self.statistics.count(handoff, end)
        self.bytes_read += handoff.bytes_read
        writing = handoff.unsettled | handoff.unheard
        source, destination = handoff.source, handoff.destination
        if source is not None:
            source.handoffs.discard(handoff.number)
            actions.append(told(handoff, source))
        if destination is not None:
            destination.handoffs.discard(handoff.number)
            if not self.quarantine.hold(handoff, destination, writing, now_s):
                actions += told_destination(handoff, destination)
        handoff.forget_blocks()
        self.tenants.account(handoff.tenant).let_go(handoff_bytes(handoff.handoff_id))
        if self.fresh_ends is not None:
            self.fresh_ends.append(handoff)
        if failure is not None and failure.reason not in GIVEN_UP:
            self._tell_failure(handoff, failure)
        return actions

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
