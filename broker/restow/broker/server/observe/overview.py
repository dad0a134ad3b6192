"""What the status page shows: engines, agents and handoffs of all tenants, bounded."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Reversible
from itertools import islice
from typing import Any

from restow.broker.core.common.keys import EngineKey, State
from restow.broker.core.common.traffic import Tally, busiest
from restow.broker.core.engines.engine import EngineRecord
from restow.broker.core.granting import Granting
from restow.broker.core.handoffs.handoff import Handoff
from restow.broker.core.handoffs.progress import progress_of
from restow.broker.core.ledger.ends import delivered
from restow.broker.core.prefix.prefixes import Prefixes
from restow.broker.core.prefix.rules import SNAPSHOT
from restow.broker.printable import shown_values
from restow.broker.server.base.hub import Hub
from restow.broker.server.base.standing import FleetReport
from restow.broker.versions import own_version

MAX_ENGINES = 256
MAX_COUNTED = 10_000
"""Of those under way, the oldest, and of the ended, the latest: a look must not hold the broker up.
"""
MAX_LISTED = 100
MAX_ENDS = 25
MAX_PAIRS = 256
"""Between which anything ended lately, those of most bytes."""
MAX_TENANTS = 64
MAX_VIEWS = 8
"""Looks of different tenants that are kept at once."""
KEPT_S = 0.5
"""However many look at one thing, it is made no more often."""

Values = dict[str, Any]


class Overview:
    """Made of a hub's directory. Belongs to the hub's event loop."""

    def __init__(self, hub: Hub) -> None:
        """Nothing has been looked at."""
        self._hub = hub
        self._made: OrderedDict[str | None, tuple[float, Values]] = OrderedDict()
        """By tenant: until when it is good, and what was seen."""

    def knows(self, tenant: str) -> bool:
        """Whether anything is there of a tenant."""
        return tenant in self._hub.directory.ledger.tenants.holdings

    def look(self, tenant: str | None = None) -> Values:
        """All that the page shows, as JSON would have it; names are what others said.

        Of one ``tenant`` that it `knows`, or of all.
        """
        now_s = self._hub.now_s()
        until_s, made = self._made.get(tenant, (0.0, {}))
        if now_s >= until_s:
            made = shown_values(self._make(tenant, now_s))
            self._made[tenant] = (now_s + KEPT_S, made)
            self._made.move_to_end(tenant)
            if len(self._made) > MAX_VIEWS:
                self._made.popitem(last=False)
        return made

    def _make(self, tenant: str | None, now_s: float) -> Values:
        directory = self._hub.directory
        ledger, engines = directory.ledger, directory.members.engines
        holdings = ledger.tenants.holdings
        names = list(islice(sorted(holdings), MAX_TENANTS))
        mine = [one for one in engines.values() if tenant in (None, one.key.tenant)]
        counted = _of(tenant, ledger.by_number.values())
        return {
            "version": own_version(),
            "epoch": self._hub.epoch,
            "now_s": now_s,
            "uptime_s": now_s - self._hub.started_s,
            "draining": directory.granting.draining,
            "fleet": _fleet(self._hub.standing.report()),
            "tenants": names,
            "tenant": tenant,
            "engines": [
                {**_engine(engine), **_held(directory.prefixes, engine.key)}
                for engine in mine[:MAX_ENGINES]
            ],
            "engines_left_out": max(0, len(mine) - MAX_ENGINES),
            "engines_ready": sum(one.has_session and one.complete for one in mine),
            "agents": sum(len(one.agents) for one in mine),
            **self._counts(tenant),
            "traffic": self._traffic(tenant, now_s),
            "pairs": _pairs(counted),
            "handoffs": [under_way(directory.granting, h, now_s) for h in counted[:MAX_LISTED]],
            "ends": [
                ended(one, now_s)
                for one in islice(_with_deliveries(tenant, ledger.ended.values()), MAX_ENDS)
            ],
        }

    def _counts(self, tenant: str | None) -> Values:
        ledger = self._hub.directory.ledger
        if tenant is None:
            live, quarantined = len(ledger.by_number), len(ledger.quarantine)
            by_state, bytes_read = ledger.statistics.by_state, ledger.bytes_read
        else:
            held = ledger.tenants.of(tenant)
            live, quarantined = held.live, held.quarantined
            by_state, bytes_read = held.ended_counts, held.bytes_read
        return {
            "live": live,
            "quarantined": quarantined,
            "bytes_read": bytes_read,
            "ended": {state.value: by_state[state] for state in State if state.ended},
        }

    def _traffic(self, tenant: str | None, now_s: float) -> Values:
        """What ended in the last quarter of an hour, in steps and by pairs."""
        ledger = self._hub.directory.ledger
        series = ledger.statistics.series
        if tenant is not None:
            series = ledger.tenants.of(tenant).traffic.series
        pairs, left_out = busiest(ledger.tenants.pairs(tenant, now_s), MAX_PAIRS)
        return {
            "step_s": series.step_s,
            "steps": [_tally(one) for one in series.latest(now_s, self._hub.started_s)],
            "pairs": [
                {
                    "source": _name(EngineKey(one.tenant, one.source)),
                    "destination": _name(EngineKey(one.tenant, one.destination)),
                    "bytes_per_s": one.tally.bytes_per_s,
                    **_tally(one.tally),
                }
                for one in pairs
            ],
            "pairs_left_out": left_out,
        }


def _fleet(report: FleetReport | None) -> Values | None:
    """Return how the broker stands among others; None: it is the only one."""
    if report is None:
        return None
    leadership = report.leadership
    return {
        "address": leadership.address,
        "brokers": len(report.brokers),
        "leads": bool(leadership.epoch),
        "leader": leadership.leader,
        "unready": report.unready,
        "trouble": "" if report.trouble is None else report.trouble.message,
    }


def _of(tenant: str | None, handoffs: Iterable[Handoff], most: int | None = None) -> list[Handoff]:
    """Those of a tenant among the first `MAX_COUNTED`; at most so many."""
    some = islice(handoffs, MAX_COUNTED)
    return list(islice((one for one in some if tenant in (None, one.tenant)), most))


def _with_deliveries(tenant: str | None, ended: Reversible[Handoff]) -> Iterator[Handoff]:
    """The latest of a tenant, each publication before its deliveries."""
    for one in _of(tenant, reversed(ended), MAX_ENDS):
        yield one
        yield from one.deliveries.by_engine.values()


def _tally(tally: Tally) -> Values:
    return {
        "done": tally.done,
        "failed": tally.failed,
        "cancelled": tally.cancelled,
        "bytes": tally.bytes_read,
        "p50_s": tally.transfers.quantile(0.5),
        "p99_s": tally.transfers.quantile(0.99),
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
        "keeps": engine.keeps,
        "ranks": [
            {"rank": one.rank, "agent": one.rank in engine.agents} for one in engine.layout.ranks
        ],
    }


def _held(prefixes: Prefixes, key: EngineKey) -> Values:
    """How much an engine says that it holds: tokens in blocks of all groups, and snapshots."""
    teller = prefixes.teller(key)
    if teller is None:
        return {"held_tokens": None, "held_snapshots": None}
    counts, quantum_tokens = prefixes.holders[key.tenant].count(teller), teller.form.quantum_tokens
    blocks = [counts[one.name] * one.block_quanta for one in teller.rules if one.whole]
    snapshots = [counts[one.name] for one in teller.rules if one.block_quanta == SNAPSHOT]
    return {
        "held_tokens": min(blocks) * quantum_tokens if blocks else None,
        "held_snapshots": min(snapshots, default=None),
    }


def _pairs(handoffs: Iterable[Handoff]) -> list[Values]:
    """How many are under way between each two engines, by state; of either one may be unknown."""
    counts = Counter((h.source, h.destination, h.state) for h in handoffs)
    return [
        {
            "source": _side(source),
            "destination": _side(destination),
            "state": state.value,
            "count": count,
        }
        for (source, destination, state), count in counts.items()
    ]


def _handoff(handoff: Handoff) -> Values:
    return {
        "handoff_id": handoff.handoff_id,
        "tenant": handoff.tenant,
        "state": handoff.state.value,
        "source": _side(handoff.source),
        "destination": _side(handoff.destination),
        "number": str(handoff.number),
        "readers": handoff.deliveries.readers,
        "delivered": delivered(handoff),
        "tokens": handoff.publication.position_tokens or None,
        "bytes": handoff.bytes_read,
    }


def under_way(granting: Granting, handoff: Handoff, now_s: float) -> Values:
    """A handoff that has not ended."""
    progress = progress_of(handoff)
    return {
        **_handoff(handoff),
        "age_s": now_s - handoff.born_s,
        "lease_s": handoff.lease.until_s - now_s if handoff.lease.until_s else None,
        "waits_for": granting.waits_for(handoff),
        "expected_bytes": progress.expected_bytes if progress else None,
        "ranks": progress.ranks if progress else 0,
        "settled_ranks": progress.settled_ranks if progress else 0,
    }


def ended(handoff: Handoff, now_s: float) -> Values:
    """A handoff that has ended."""
    failure = handoff.failure
    return {
        **_handoff(handoff),
        "ago_s": now_s - handoff.ended_s,
        "transfer_s": handoff.transfer_s,
        "strategies": list(handoff.strategies),
        "reason": failure.reason if failure else "",
        "detail": failure.detail if failure else "",
    }
