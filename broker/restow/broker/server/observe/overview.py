"""What the status page shows: engines, agents and handoffs of all tenants, bounded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import islice
from typing import Any

from restow.broker.core.actions import EngineKey, State
from restow.broker.core.engines.engine import EngineRecord
from restow.broker.core.granting import Granting
from restow.broker.core.handoffs.handoff import Handoff
from restow.broker.printable import shown_values
from restow.broker.server.hub import Hub
from restow.broker.versions import own_version

MAX_ENGINES = 256
MAX_COUNTED = 10_000
"""Of those under way, the oldest: a look must not hold the broker up."""
MAX_LISTED = 100
MAX_ENDS = 25
KEPT_S = 0.5
"""However many look, it is made no more often."""

Values = dict[str, Any]


class Overview:
    """Made of a hub's directory. Belongs to the hub's event loop."""

    def __init__(self, hub: Hub) -> None:
        """Nothing has been looked at."""
        self._hub = hub
        self._made: Values = {}
        self._until_s = 0.0

    def look(self) -> Values:
        """All that the page shows, as JSON would have it; names are what others said."""
        now_s = self._hub.now_s()
        if now_s >= self._until_s:
            self._made, self._until_s = shown_values(self._make(now_s)), now_s + KEPT_S
        return self._made

    def _make(self, now_s: float) -> Values:
        directory = self._hub.directory
        ledger, engines = directory.ledger, directory.members.engines
        counted = list(islice(ledger.live.values(), MAX_COUNTED))
        by_state = ledger.statistics.by_state
        return {
            "version": own_version(),
            "epoch": self._hub.epoch,
            "now_s": now_s,
            "uptime_s": now_s - self._hub.started_s,
            "draining": directory.granting.draining,
            "engines": [_engine(engine) for engine in islice(engines.values(), MAX_ENGINES)],
            "engines_left_out": max(0, len(engines) - MAX_ENGINES),
            "live": len(ledger.live),
            "quarantined": len(ledger.quarantine),
            "bytes_read": ledger.bytes_read,
            "ended": {state.value: by_state[state] for state in State if state.ended},
            "pairs": _pairs(counted),
            "handoffs": [
                _under_way(directory.granting, one, now_s) for one in counted[:MAX_LISTED]
            ],
            "ends": [
                _ended(one, now_s) for one in islice(reversed(ledger.ended.values()), MAX_ENDS)
            ],
        }


def _name(key: EngineKey) -> str:
    return key.engine_id if key.tenant == "default" else f"{key.tenant}/{key.engine_id}"


def _side(engine: EngineRecord | None) -> str | None:
    return None if engine is None else _name(engine.key)


def _engine(engine: EngineRecord) -> Values:
    return {
        "name": _name(engine.key),
        "model": engine.layout.model.name,
        "session": engine.has_session,
        "publishes": engine.publishes,
        "asks": engine.asks,
        "ranks": [
            {"rank": one.rank, "agent": one.rank in engine.agents} for one in engine.layout.ranks
        ],
    }


def _pairs(handoffs: Iterable[Handoff]) -> list[Values]:
    """How many are under way between each two engines, by state; of either one may be unknown."""
    counts = Counter((_side(h.source), _side(h.destination), h.state.value) for h in handoffs)
    return [
        {"source": source, "destination": destination, "state": state, "count": count}
        for (source, destination, state), count in counts.items()
    ]


def _handoff(handoff: Handoff) -> Values:
    return {
        "handoff_id": handoff.handoff_id,
        "state": handoff.state.value,
        "source": _side(handoff.source),
        "destination": _side(handoff.destination),
        "tokens": handoff.publication.position_tokens or None,
    }


def _under_way(granting: Granting, handoff: Handoff, now_s: float) -> Values:
    lease_s = handoff.lease.until_s - now_s if handoff.lease.until_s else None
    return {
        **_handoff(handoff),
        "age_s": now_s - handoff.born_s,
        "lease_s": lease_s,
        "waits_for": granting.waits_for(handoff),
    }


def _ended(handoff: Handoff, now_s: float) -> Values:
    failure = handoff.failure
    return {
        **_handoff(handoff),
        "ago_s": now_s - handoff.ended_s,
        "bytes": handoff.bytes_read,
        "transfer_s": handoff.ended_s - handoff.granted_s if handoff.granted_s else None,
        "strategies": list(handoff.strategies),
        "reason": failure.reason if failure else "",
        "detail": failure.detail if failure else "",
    }
