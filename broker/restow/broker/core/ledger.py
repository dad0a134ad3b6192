"""The ledger: every handoff, live and ended, and the one way in which they end."""

from __future__ import annotations

import math
from collections import OrderedDict

from restow.broker.core.actions import Action, State
from restow.broker.core.deadlines import Deadlines
from restow.broker.core.digests import Checks
from restow.broker.core.events import Failure
from restow.broker.core.figures import Figures
from restow.broker.core.grant import release_staging
from restow.broker.core.handoff import Handoff, told
from restow.broker.core.limits import Limits
from restow.broker.core.numbers import Numbers
from restow.broker.core.quarantine import Quarantine
from restow.broker.core.roster import EngineRecord
from restow.broker.core.tenants import Tenants
from restow.broker.errors import DirectoryFullError, HandoffUnknownError, RequestError

MAX_ID_LENGTH = 256


class Ledger:
    """Handoffs by id and by number. `EngineRecord.handoffs` has those of an engine."""

    def __init__(self, limits: Limits, first_us: int) -> None:
        """Start empty; the numbers of handoffs begin at ``first_us``."""
        self.limits = limits
        self.live: dict[tuple[str, str], Handoff] = {}
        self.by_number: dict[int, Handoff] = {}
        self.ended: OrderedDict[tuple[str, str], Handoff] = OrderedDict()
        self.figures = Figures()
        self.fresh_ends: list[Handoff] | None = None
        """What ended since somebody looked; None: nobody looks."""
        self.bytes_read = 0
        self.checks = Checks()
        self.deadlines = Deadlines()
        self.tenants = Tenants(limits)
        self.quarantine = Quarantine(self.tenants)
        self._numbers = Numbers(first_us)

    def find(self, tenant: str, handoff_id: str) -> Handoff:
        """Look a handoff up, live or ended. Raises `HandoffUnknownError`."""
        key = (tenant, handoff_id)
        handoff = self.live.get(key) or self.ended.get(key)
        if handoff is None:
            raise HandoffUnknownError(f"handoff {handoff_id} is not known here", handoff=handoff_id)
        return handoff

    def look_up(self, engine: EngineRecord, handoff_id: str) -> Handoff | None:
        """The handoff of that id in the engine's tenant, live or ended."""
        key = (engine.key.tenant, handoff_id)
        return self.live.get(key) or self.ended.get(key)

    def find_of(self, engine: EngineRecord, handoff_id: str) -> Handoff:
        """The handoff, live or ended, that the engine has a side of.

        Raises `HandoffUnknownError`.
        """
        handoff = self.look_up(engine, handoff_id)
        if handoff is None or (engine is not handoff.source and engine is not handoff.destination):
            raise HandoffUnknownError(
                f"engine {engine.key.engine_id} has no handoff {handoff_id}", handoff=handoff_id
            )
        return handoff

    def make(self, engine: EngineRecord, handoff_id: str, now_s: float) -> Handoff:
        """Begin a handoff of an id that is not known.

        Raises `RequestError`, `QuotaExceededError` or `DirectoryFullError`.
        """
        if not 0 < len(handoff_id) <= MAX_ID_LENGTH:
            raise RequestError(
                f"handoff_id must have 1 to {MAX_ID_LENGTH} characters", field="handoff_id"
            )
        tenant = engine.key.tenant
        self.tenants.check_handoff(tenant)
        if len(self.live) + len(self.quarantine) >= self.limits.max_live:
            raise DirectoryFullError(
                f"the broker holds {self.limits.max_live} handoffs, as many as it may: try again "
                f"later"
            )
        number = self._numbers.take(now_s)
        handoff = Handoff(number, tenant, handoff_id, now_s)
        self.live[tenant, handoff_id] = handoff
        self.by_number[number] = handoff
        self.tenants.add_live(tenant, 1)
        return handoff

    def unmake(self, handoff: Handoff) -> None:
        """Leave no trace of a handoff whose first call was refused."""
        del self.live[handoff.tenant, handoff.handoff_id]
        del self.by_number[handoff.number]
        self.tenants.add_live(handoff.tenant, -1)

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
        """Something broke. Ranks that may be reading are waited for."""
        handoff.fail(failure, now_s)
        handoff.forget_untold()
        if handoff.granted and handoff.unsettled:
            return []
        return self.end(handoff, now_s)

    def end(self, handoff: Handoff, now_s: float) -> list[Action]:
        """The one way to an end: tell both sides, give staging back, keep the story.

        D is told later while a rank of its may still write.
        """
        failure = handoff.failure
        handoff.forget_untold()
        actions = release_staging(handoff)
        handoff.state = State.DONE if failure is None else failure.state
        handoff.ended = True
        handoff.ended_s = now_s
        if handoff.pair is not None and handoff.pair.hashed:
            if failure is None:
                handoff.note(now_s, "checked", "what D read is what P hashed before")
            for checks in (self.checks, self.tenants.of(handoff.tenant).checks):
                checks.count(handoff.state, failure)
        handoff.note(now_s, "ended", handoff.state)
        key = (handoff.tenant, handoff.handoff_id)
        del self.live[key]
        del self.by_number[handoff.number]
        self.ended[key] = handoff
        forgotten = self.tenants.ended(*key, handoff.state, handoff.bytes_read)
        if forgotten is not None:
            del self.ended[handoff.tenant, forgotten]
        if len(self.ended) > self.limits.max_ended:
            (tenant, _), _ = self.ended.popitem(last=False)
            self.tenants.forget_oldest(tenant)
        self.figures.count(handoff)
        self.bytes_read += handoff.bytes_read
        writing = handoff.unsettled | handoff.unheard
        for engine in (handoff.source, handoff.destination):
            if engine is not None:
                engine.handoffs.discard(handoff.number)
                is_destination = engine is handoff.destination
                if not (is_destination and self.quarantine.hold(handoff, engine, writing, now_s)):
                    actions.append(told(handoff, engine))
        handoff.forget_blocks()
        if self.fresh_ends is not None:
            self.fresh_ends.append(handoff)
        return actions
