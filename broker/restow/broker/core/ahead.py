"""Prepare plans, costs and agents of pairs in the background, so that no handoff waits for costs.

A pair is prepared when its engines register, and when it hands over by a plan of other costs than
its own. Pairs are prepared singly, and only when no handoff waits for a plan. A failure here is not
reported: a handoff that needs the plan finds it again and reports it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from math import inf

from restow.broker.core.common.actions import Action
from restow.broker.core.common.keys import PairKey
from restow.broker.core.common.pair import PairRefused
from restow.broker.core.engines.engine import EngineRecord, pool_of
from restow.broker.core.granting import Granting
from restow.broker.core.handoffs.grant import introduce
from restow.broker.core.ledger.ledger import Ledger
from restow.broker.core.membership import Membership
from restow.broker.core.plans import Plans
from restow.broker.core.probing import Probing

LOOKED_AT = 64
"""Engines of the pool, the latest first, that are considered as partners of a new engine."""
MAX_QUEUED = 256
"""Queued pairs per tenant."""
BUSY_S = 10.0
"""How long a pair waits for its agents to be idle; then it is measured while they read."""


@dataclass(slots=True, eq=False)
class _Expected:
    """A pair of engines that may hand over."""

    source: EngineRecord
    destination: EngineRecord
    busy_until_s: float = inf
    """When it is measured although its agents read."""
    planned: set[PairKey] = field(default_factory=set)
    """Plans already requested; a plan that was not kept is made again only when a handoff needs
    it."""

    @property
    def there(self) -> bool:
        """Return whether both engines are registered with all agents and not draining."""
        sides = (self.source, self.destination)
        return not any(side.gone or side.draining or not side.complete for side in sides)


class Ahead:
    """Queued pairs. Tenants take turns."""

    def __init__(
        self,
        ledger: Ledger,
        members: Membership,
        granting: Granting,
        plans: Plans,
        probing: Probing,
    ) -> None:
        """Begin without pairs."""
        self._ledger = ledger
        self._members = members
        self._granting, self._plans = granting, plans
        self._probing = probing
        self._queues: OrderedDict[str, OrderedDict[PairKey, _Expected]] = OrderedDict()
        """By tenant, then by plan and hosts; pairs with the same key are prepared once."""
        self._current: tuple[PairKey, _Expected] | None = None

    def __len__(self) -> int:
        """Return the number of pairs that wait or are being prepared."""
        queued = sum(map(len, self._queues.values())) + len(self._plans.rough)
        return queued + (self._current is not None)

    def expect(self, engine: EngineRecord) -> None:
        """Queue the pairs of an engine whose agents are all connected."""
        if engine.gone or not engine.complete:
            return
        queue = self._queues.setdefault(engine.key.tenant, OrderedDict())
        more = 0
        for pair in self._pairs(engine):
            if more == self._ledger.limits.pairs_ahead or len(queue) >= MAX_QUEUED:
                break
            best = self._plans.best(pair.source, pair.destination)
            key = best.key._replace(hosts=best.own)
            known = queue.get(key)
            if (known is None or not known.there) and key not in self._plans.known:
                queue[key] = pair
                more += 1
        if not queue:
            del self._queues[engine.key.tenant]

    def _pairs(self, engine: EngineRecord) -> Iterator[_Expected]:
        """Yield possible pairs; pairs of different layouts first, as P and D often differ."""
        pool = reversed(self._members.pools[pool_of(engine)].values())
        partners = [
            partner
            for partner in islice(pool, LOOKED_AT)
            if partner is not engine and partner.complete and _may_be_alike(partner, engine)
        ]
        partners.sort(key=lambda partner: partner.layout_digest == engine.layout_digest)
        for partner in partners:
            if engine.may_publish and partner.may_ask:
                yield _Expected(engine, partner)
            if partner.may_publish and engine.may_ask:
                yield _Expected(partner, engine)

    def tick(self, now_s: float) -> list[Action]:
        """Continue with a single pair."""
        if self._granting.draining:
            return []
        if self._plans.rough:
            self._improve()
        current, self._current = self._current or self._next(), None
        if current is None or not current[1].there:
            return []
        key, pair = current
        source, destination = pair.source, pair.destination
        own, used, plan = self._plans.best(source, destination)
        if plan is None:
            return self._plan(key, pair, used)
        if isinstance(plan, PairRefused):
            return []
        if used.hosts != own and own is not None and self._probing.are_known(own):
            return self._plan(key, pair, used._replace(hosts=own))
        # Measuring and introducing agents grants the right to read, as a handoff would.
        if not (source.publishes and destination.asks):
            return []
        if used.hosts != own:
            if self._is_busy(source) or self._is_busy(destination):
                pair.busy_until_s = min(pair.busy_until_s, now_s + BUSY_S)
                if now_s < pair.busy_until_s:
                    self._put_back(key, pair)
                    return []
            actions = self._probing.measure(source, destination, plan, now_s)
            if actions is not None:
                self._current = current
                return actions
        return introduce(source, destination, plan)

    def _improve(self) -> None:
        """Queue the pairs that handed over by a plan of other costs than their own."""
        while self._plans.rough:
            key, (source, destination) = self._plans.rough.popitem(last=False)
            queue = self._queues.setdefault(key.tenant, OrderedDict())
            if len(queue) < MAX_QUEUED:
                queue[key] = _Expected(source, destination)

    def _plan(self, key: PairKey, pair: _Expected, wanted: PairKey) -> list[Action]:
        planning = self._plans.planning
        if wanted in planning:
            self._current = key, pair
        elif planning:
            self._put_back(key, pair)
        elif wanted not in pair.planned:
            self._current = key, pair
            pair.planned.add(wanted)
            return self._plans.make(wanted, pair.source, pair.destination, ahead=True)
        return []

    def _is_busy(self, engine: EngineRecord) -> bool:
        """Return whether the engine's agents read or are read."""
        return any(self._ledger.by_number[number].granted for number in engine.handoffs)

    def _next(self) -> tuple[PairKey, _Expected] | None:
        if not self._queues:
            return None
        tenant, queue = self._queues.popitem(last=False)
        entry = queue.popitem(last=False)
        if queue:
            self._queues[tenant] = queue
        return entry

    def _put_back(self, key: PairKey, pair: _Expected) -> None:
        """Queue a pair again, behind all others."""
        self._queues.setdefault(key.tenant, OrderedDict()).setdefault(key, pair)


def _may_be_alike(engine: EngineRecord, partner: EngineRecord) -> bool:
    """Return whether two engines may have equal weights; a store has states of any weights."""
    return engine.keeps or partner.keeps or engine.revision == partner.revision
