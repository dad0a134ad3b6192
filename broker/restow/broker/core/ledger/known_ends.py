"""Ends that another broker told one side: this broker completes what the other side still has open.

    first broker     P publishes (message 7), D asks (message 5), DONE; D is told; the broker dies
    this broker      P publishes again (message 7)   -- P has its pages back, DONE
                     D tells the end: "DONE, of P's message 7"

D's word frees P's pages. P's word gives D its state: a broker tells P of DONE only when each rank
of D has read everything. An end belongs to one attempt, so it counts only for the very words that
it names: the engine, its life and the number of its message, which that engine must have said to a
broker before. D's agents must be the processes that had read: the end has a fingerprint of them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from restow.broker.core.common.actions import Action
from restow.broker.core.common.events import KnownEnd
from restow.broker.core.common.keys import Counterpart
from restow.broker.core.engines.engine import EngineRecord
from restow.broker.core.handoffs.demand import NO_DEMAND
from restow.broker.core.handoffs.handoff import Handoff
from restow.broker.core.handoffs.publication import NOTHING_PUBLISHED
from restow.broker.core.ledger.ledger import Ledger
from restow.broker.errors import RestowError

KEPT_S = 60.0
"""How long an end waits here for the words that it belongs to."""
MAX_KEPT = 1 << 14
"""Ends that are kept; the oldest are forgotten first."""


@dataclass(slots=True, eq=False)
class KnownWord:
    """One end, of the words of one counterpart, and the engine that told it."""

    engine: EngineRecord
    end: KnownEnd
    other: Counterpart

    def is_of(self, engine: EngineRecord | None, numbers: tuple[int, ...]) -> bool:
        """Return whether the counterpart is ``engine``, and one of ``numbers`` is its word."""
        return (
            engine is not None
            and (engine.key.engine_id, engine.incarnation)
            == (self.other.engine_id, self.other.incarnation)
            and not set(self.other.messages).isdisjoint(numbers)
        )


class KnownEnds:
    """The ends that engines have told a ledger, by handoff."""

    def __init__(self, ledger: Ledger) -> None:
        """Know none."""
        self._ledger = ledger
        self.by_id: dict[tuple[str, str], list[KnownWord]] = {}
        self._kept: deque[tuple[float, tuple[str, str], KnownWord]] = deque()

    def __len__(self) -> int:
        """Return how many are kept."""
        return len(self._kept)

    def hear(
        self, engine: EngineRecord, handoff_id: str, end: KnownEnd, now_s: float
    ) -> list[Action]:
        """Take an end that an engine was told; complete the other side, or keep it for that."""
        key = (engine.key.tenant, handoff_id)
        if key in self._ledger.ended:
            return []
        for other in end.counterparts:
            known = KnownWord(engine, end, other)
            self.by_id.setdefault(key, []).append(known)
            self._kept.append((now_s + KEPT_S, key, known))
        self.tick(now_s)
        actions: list[Action] = []
        handoff = self._ledger.live.get(key)
        for one in () if handoff is None else (handoff, *handoff.deliveries):
            actions += self.complete(one, now_s)
        return actions

    def tick(self, now_s: float) -> None:
        """Forget those that are too old or too many."""
        while self._kept and (self._kept[0][0] <= now_s or len(self._kept) > MAX_KEPT):
            _, key, known = self._kept.popleft()
            left = self.by_id[key]
            left.remove(known)
            if not left:
                del self.by_id[key]

    def complete(self, handoff: Handoff, now_s: float) -> list[Action]:
        """End a live handoff or delivery as its other side was told, if its words are the same."""
        actions: list[Action] = []
        for known in self.by_id.get((handoff.tenant, handoff.handoff_id), ()):
            if handoff.ended:
                break
            if known.end.of_demand:
                actions += self._complete_source(handoff, known, now_s)
            else:
                actions += self._complete_destination(handoff, known, now_s)
        return actions

    def _complete_source(self, handoff: Handoff, known: KnownWord, now_s: float) -> list[Action]:
        """D was told an end: P's pages are of no more use to it."""
        side, engine, end = handoff.side, known.engine, known.end
        if handoff.parent is not None or not side.repeated:
            return []
        # Another D may have asked for it meanwhile.
        if handoff.destination is not None or engine.key in handoff.deliveries.by_engine:
            return []
        if not known.is_of(side.engine, (side.number,)):
            return []
        part, readers = handoff, self._ledger.readers
        if handoff.shared or end.readers:
            try:
                part = readers.begin(handoff, engine, now_s)
            except RestowError:  # no place or no room is left
                return []
            readers.keep(part, engine)
            readers.name(handoff, end.readers)
        part.destination = engine
        part.demand = NO_DEMAND._replace(
            position_tokens=end.position, content=side.publication.content * end.compared
        )
        return self._end(part, known, now_s)

    def _complete_destination(self, part: Handoff, known: KnownWord, now_s: float) -> list[Action]:
        """P was told an end: what D waits for is there, or will not come."""
        engine, end, demand = part.destination, known.end, part.demand
        if engine is None or part.source is not None or not part.asked_again:
            return []
        if not known.is_of(engine, part.demand_messages.numbers):
            return []
        told: list[Action] = []
        if end.failure is None:
            agents = engine.fingerprint()
            if not agents or agents != known.other.agents:
                return []
            part.side.publication = NOTHING_PUBLISHED._replace(
                position_tokens=end.position,
                content=demand.content * end.compared,
                final=True,
                sampled_token=end.sampled,
            )
            told = part.tell_sampled()
        return told + self._end(part, known, now_s)

    def _end(self, part: Handoff, known: KnownWord, now_s: float) -> list[Action]:
        part.bytes_read = known.end.bytes
        part.timeline.note(now_s, "ended before", known.engine.key.engine_id)
        if known.end.failure is not None:
            return self._ledger.stop(part, known.end.failure, now_s)
        return self._ledger.end(part, now_s)
