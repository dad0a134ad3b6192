"""Ends that an earlier broker told one side; this broker completes the other side's handoff.

    first broker     P publishes (message 7), D asks (message 5), DONE; D is told; the broker dies
    this broker      P publishes again (message 7)   -- P has its pages back, DONE
                     D tells the end: "DONE, of P's message 7"

An end that D reports frees P's pages. An end that P reports gives D its state: a broker tells P of
DONE only after each rank of D has read everything. An end belongs to a single attempt. It therefore
counts only for the messages that it names (engine, incarnation and message number), and only if
that engine had sent such a message to an earlier broker. D's agents must be the processes that had
read; the end has their fingerprint.
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
"""How long an end waits for the messages that it belongs to."""
MAX_KEPT = 1 << 14
"""Ends that are kept; the oldest are forgotten first."""


@dataclass(slots=True, eq=False)
class KnownWord:
    """An end, the counterpart whose messages it names, and the engine that reported it."""

    engine: EngineRecord
    end: KnownEnd
    counterpart: Counterpart

    def is_of(self, engine: EngineRecord | None, numbers: tuple[int, ...]) -> bool:
        """Return whether the counterpart is ``engine`` and sent one of the messages ``numbers``."""
        return (
            engine is not None
            and (engine.key.engine_id, engine.incarnation)
            == (self.counterpart.engine_id, self.counterpart.incarnation)
            and not set(self.counterpart.messages).isdisjoint(numbers)
        )


class KnownEnds:
    """The ends that engines have reported, by handoff."""

    def __init__(self, ledger: Ledger) -> None:
        """Begin without ends."""
        self._ledger = ledger
        self.by_id: dict[tuple[str, str], list[KnownWord]] = {}
        self._kept: deque[tuple[float, tuple[str, str], KnownWord]] = deque()

    def __len__(self) -> int:
        """Return the number of ends."""
        return len(self._kept)

    def hear(
        self, engine: EngineRecord, handoff_id: str, end: KnownEnd, now_s: float
    ) -> list[Action]:
        """Accept an end that an engine reports; complete the other side now, or when it speaks."""
        key = (engine.key.tenant, handoff_id)
        if key in self._ledger.ended:
            return []
        for counterpart in end.counterparts:
            known = KnownWord(engine, end, counterpart)
            self.by_id.setdefault(key, []).append(known)
            self._kept.append((now_s + KEPT_S, key, known))
        self.tick(now_s)
        actions: list[Action] = []
        handoff = self._ledger.live.get(key)
        for part in () if handoff is None else (handoff, *handoff.deliveries):
            actions += self.complete(part, now_s)
        return actions

    def tick(self, now_s: float) -> None:
        """Forget ends that are too old or too many."""
        while self._kept and (self._kept[0][0] <= now_s or len(self._kept) > MAX_KEPT):
            _, key, known = self._kept.popleft()
            left = self.by_id[key]
            left.remove(known)
            if not left:
                del self.by_id[key]

    def complete(self, handoff: Handoff, now_s: float) -> list[Action]:
        """End a live handoff as its other side was told, if the end names its messages."""
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
        """End P's handoff: D reported an end, and needs P's pages no more."""
        side, engine, end = handoff.side, known.engine, known.end
        if handoff.parent is not None or not side.repeated:
            return []
        # Another D may have asked for the handoff in the meantime.
        if handoff.destination is not None or engine.key in handoff.deliveries.by_engine:
            return []
        if not known.is_of(side.engine, (side.number,)):
            return []
        part, readers = handoff, self._ledger.readers
        if handoff.shared or end.readers:
            try:
                part = readers.begin(handoff, engine, now_s)
            except RestowError:  # no reader's place or no memory is left
                return []
            readers.keep(part, engine)
            readers.name(handoff, end.readers)
        part.destination = engine
        part.demand = NO_DEMAND._replace(
            position_tokens=end.position, content=side.publication.content * end.compared
        )
        return self._end(part, known, now_s)

    def _complete_destination(self, part: Handoff, known: KnownWord, now_s: float) -> list[Action]:
        """End D's handoff: P reported an end, so D has the state or will not get it."""
        engine, end, demand = part.destination, known.end, part.demand
        if engine is None or part.source is not None or not part.asked_again:
            return []
        if not known.is_of(engine, part.demand_messages.numbers):
            return []
        told: list[Action] = []
        if end.failure is None:
            agents = engine.fingerprint()
            if not agents or agents != known.counterpart.agents:
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
