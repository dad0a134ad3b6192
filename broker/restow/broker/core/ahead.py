"""Ahead of requests: engines of one pool have their plans made, and costs measured, when they come.

One pair at a time, and behind all that a handoff waits for. What does not come of it, a first
handoff has found out, and may say why.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from restow.broker.core.common.actions import Action
from restow.broker.core.common.keys import PairKey
from restow.broker.core.common.pair import PairRefused
from restow.broker.core.engines.engine import EngineRecord, pool_of
from restow.broker.core.granting import Granting
from restow.broker.core.ledger.ledger import Ledger
from restow.broker.core.membership import Membership
from restow.broker.core.probing import Probing

LOOKED_AT = 64
"""Engines of the pool, the latest first, of which any may make a pair with one that comes."""
MAX_QUEUED = 256
"""Pairs of one tenant."""


@dataclass(slots=True, eq=False)
class _Expected:
    """A pair that may hand over."""

    source: EngineRecord
    destination: EngineRecord
    planned: set[PairKey] = field(default_factory=set)
    """Asked for already: a plan that was not kept is made when a handoff needs it."""

    @property
    def there(self) -> bool:
        """Whether both sides are, with all agents, and take part in what is new."""
        sides = (self.source, self.destination)
        return not any(one.gone or one.draining or not one.complete for one in sides)


class Ahead:
    """Pairs that wait for their turn, each tenant's behind one of any other. Pure."""

    def __init__(
        self, ledger: Ledger, members: Membership, granting: Granting, probing: Probing
    ) -> None:
        """Expect no pair."""
        self._ledger = ledger
        self._members = members
        self._granting = granting
        self._probing = probing
        self._queues: OrderedDict[str, OrderedDict[PairKey, _Expected]] = OrderedDict()
        """By tenant, and by what is to be found out: of replicas one pair speaks for all."""
        self._current: tuple[PairKey, _Expected] | None = None

    def __len__(self) -> int:
        """How many pairs wait, or are being seen to."""
        return sum(map(len, self._queues.values())) + (self._current is not None)

    def expect(self, engine: EngineRecord) -> None:
        """Have plans and costs ready for an engine that is there with all its agents."""
        if engine.gone or not engine.complete:
            return
        queue = self._queues.setdefault(engine.key.tenant, OrderedDict())
        more = 0
        for pair in self._pairs(engine):
            if more == self._ledger.limits.pairs_ahead or len(queue) >= MAX_QUEUED:
                break
            hosts = self._probing.hosts(pair.source, pair.destination)
            key = self._granting.key_of(pair.source, pair.destination)._replace(hosts=hosts)
            known = queue.get(key)
            if (known is None or not known.there) and key not in self._granting.pairs:
                queue[key] = pair
                more += 1
        if not queue:
            del self._queues[engine.key.tenant]

    def _pairs(self, engine: EngineRecord) -> Iterator[_Expected]:
        """Those that it may make with others: of unlike layouts first, as P and D often have."""
        pool = reversed(self._members.pools[pool_of(engine)].values())
        others = [
            one
            for one in islice(pool, LOOKED_AT)
            if one is not engine and one.complete and _may_be_alike(one, engine)
        ]
        others.sort(key=lambda other: other.layout_digest == engine.layout_digest)
        for other in others:
            if engine.may_publish and other.may_ask:
                yield _Expected(engine, other)
            if other.may_publish and engine.may_ask:
                yield _Expected(other, engine)

    def tick(self, now_s: float) -> list[Action]:
        """Go on with one pair."""
        if self._granting.draining:
            return []
        current, self._current = self._current or self._next(), None
        if current is None or not current[1].there:
            return []
        key, pair = current
        source, destination = pair.source, pair.destination
        wanted = self._granting.key_of(source, destination)
        plan = self._granting.pairs.get(wanted)
        if plan is None:
            return self._plan(key, pair, wanted)
        # To measure is to let the destination read: only where a handoff would let it, too.
        if isinstance(plan, PairRefused) or not (source.publishes and destination.asks):
            return []
        if wanted.hosts is not None:
            return []
        if self._is_busy(source) or self._is_busy(destination):
            self._put_back(key, pair)
            return []
        actions = self._probing.measure(source, destination, plan, now_s)
        if actions is not None:
            self._current = current
        return actions or []

    def _plan(self, key: PairKey, pair: _Expected, wanted: PairKey) -> list[Action]:
        planning = self._granting.planning
        if wanted in planning:
            self._current = key, pair
        elif planning:
            self._put_back(key, pair)
        elif wanted not in pair.planned:
            self._current = key, pair
            pair.planned.add(wanted)
            return self._granting.plan(wanted, pair.source, pair.destination, ahead=True)
        return []

    def _is_busy(self, engine: EngineRecord) -> bool:
        """Whether its agents read or are read."""
        return any(self._ledger.by_number[number].granted for number in engine.handoffs)

    def _next(self) -> tuple[PairKey, _Expected] | None:
        if not self._queues:
            return None
        tenant, queue = self._queues.popitem(last=False)
        found = queue.popitem(last=False)
        if queue:
            self._queues[tenant] = queue
        return found

    def _put_back(self, key: PairKey, pair: _Expected) -> None:
        """Behind all others."""
        self._queues.setdefault(key.tenant, OrderedDict()).setdefault(key, pair)


def _may_be_alike(one: EngineRecord, other: EngineRecord) -> bool:
    """Whether two engines of a pool have the same weights; a store has states of any."""
    return one.keeps or other.keeps or one.revision == other.revision
