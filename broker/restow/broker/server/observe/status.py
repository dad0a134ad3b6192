"""Make the figures, engines, traffic and tables of the status page, of all tenants or of a tenant.

They are made from the answers of `restow.v1.Admin`, by the same documents and rows as the tables
of commands.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from restow.broker.core.common.keys import EngineKey
from restow.broker.core.engines.engine import EngineRecord
from restow.broker.core.handoffs.handoff import Handoff
from restow.broker.display.documents import (
    Values,
    engines_json,
    handoff_json,
    handoffs_json,
    holdings_json,
    status_json,
    traffic_json,
)
from restow.broker.display.rows import (
    COLUMNS,
    ENDED,
    PAIRS,
    UNDER_WAY,
    about,
    charts,
    figures,
    held_text,
    name_tenants,
    pair_row,
    row,
    series,
    timeline,
)
from restow.broker.draw.bytes_and_seconds import duration_text
from restow.broker.printable import shown, shown_values
from restow.broker.server.base.hub import Hub
from restow.broker.server.base.standing import FleetReport
from restow.broker.server.services.admin_messages import (
    engine_info,
    handoff_info,
    whole_story,
    with_deliveries,
)
from restow.broker.server.services.admin_service import add_traffic, broker_status
from restow.broker.server.services.prefix_messages import engine_holdings
from restow.v1 import admin_pb2 as pb


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bound the work of a look, so that it does not delay the broker."""

    counted: int = 10_000
    """Handoffs that are read: the oldest under way, and the latest ends."""
    listed: int = 100
    """Rows of handoffs under way, the oldest."""
    ends: int = 25
    engines: int = 256
    pairs: int = 256
    tenants: int = 64
    views: int = 8
    """Looks of different tenants that are kept."""
    kept_s: float = 0.5
    """How long a look is kept for all who ask for it."""


class StatusPage:
    """Look at a hub's directory for the page. Belongs to the hub's event loop."""

    def __init__(self, hub: Hub, bounds: Bounds | None = None) -> None:
        """Look at a hub."""
        self._hub, self._bounds = hub, bounds or Bounds()
        self._made: OrderedDict[str | None, tuple[float, Values]] = OrderedDict()
        """Looks by tenant, each with the time until which it is kept."""

    def look(self, query: Mapping[str, str]) -> Values | None:
        """Return ``/status.json`` of the query's ``tenant``, or of all; None: it has nothing."""
        tenant, now_s = query.get("tenant"), self._hub.now_s()
        if tenant is not None and tenant not in self._hub.directory.ledger.tenants.holdings:
            return None
        until_s, made = self._made.get(tenant, (0.0, {}))
        if now_s >= until_s:
            made = self._make(tenant, now_s)
            self._made[tenant] = (now_s + self._bounds.kept_s, made)
            self._made.move_to_end(tenant)
            if len(self._made) > self._bounds.views:
                self._made.popitem(last=False)
        return made

    def handoff(self, query: Mapping[str, str]) -> Values | None:
        """Return ``/handoff.json`` of the ``id`` of a ``tenant``; None: the id is not known."""
        ledger, granting = self._hub.directory.ledger, self._hub.directory.granting
        handoff = ledger.known(query.get("tenant", "default"), query.get("id", ""))
        if handoff is None:
            return None
        story = whole_story(handoff, granting, self._hub.now_s())
        return _story(shown_values(handoff_json(story)))

    def _make(self, tenant: str | None, now_s: float) -> Values:
        directory, bounds = self._hub.directory, self._bounds
        ledger, members = directory.ledger, directory.members.engines
        of_tenant = [engine for engine in members.values() if tenant in (None, engine.key.tenant)]
        live = self._some(tenant, ledger.by_number.values())
        ends = self._some(tenant, reversed(ledger.ended.values()))
        told = broker_status(self._hub, tenant)
        add_traffic(told, self._hub, tenant, tenant)
        status, traffic = status_json(told, ""), traffic_json(told)
        engines = engines_json(engine_info(engine, now_s) for engine in of_tenant)["engines"]
        several = tenant is None and len(ledger.tenants.holdings) > 1
        if several:
            name_tenants(engines, "engine_id")
            name_tenants(traffic["pairs"], "source_engine", "destination_engine")
        lease_s = min(
            (handoff.lease.until_s for handoff in live if handoff.lease.until_s), default=None
        )
        held_s = None if lease_s is None else lease_s - now_s
        listed = [
            self._card(engine, info)
            for engine, info in zip(of_tenant, engines[: bounds.engines], strict=False)
        ]
        return {
            "version": status["version"],
            "epoch": status["broker_epoch"],
            "uptime": duration_text(status["uptime_s"]),
            "draining": status["draining"],
            "fleet": _fleet(self._hub.standing.report()),
            "tenants": shown_values(sorted(ledger.tenants.holdings)[: bounds.tenants]),
            "tenant": tenant,
            "figures": figures(status, engines, traffic, held_s),
            "engines": shown_values(listed),
            "engines_left_out": len(engines) - len(listed),
            "traffic": _traffic(traffic, now_s),
            "pairs": [
                {
                    "bytes": pair["bytes"],
                    **dict(zip(PAIRS, map(shown, pair_row(pair)), strict=True)),
                }
                for pair in traffic["pairs"][: bounds.pairs]
            ],
            "pairs_left_out": len(told.pairs[bounds.pairs :]) + told.pairs_left_out,
            "lines": shown_values(_lines(live, several)),
            "under_way": self._table(UNDER_WAY, live[: bounds.listed], several, told.handoffs_live),
            "ended": self._table(ENDED, islice(with_deliveries(ends), bounds.ends), several),
        }

    def _some(self, tenant: str | None, handoffs: Iterable[Handoff]) -> list[Handoff]:
        """Return the handoffs of a tenant, or of all, among the first that are read."""
        some = islice(handoffs, self._bounds.counted)
        return [handoff for handoff in some if tenant in (None, handoff.tenant)]

    def _card(self, engine: EngineRecord, told: Values) -> Values:
        """Return what the page tells of an engine, with how much of prefixes it holds."""
        prefixes = self._hub.directory.prefixes
        teller, held = prefixes.teller(engine.key), ""
        if teller is not None:
            holdings = engine_holdings(teller, prefixes.holders[engine.key.tenant], engine)
            (document,) = holdings_json(pb.ListHoldingsResponse(engines=[holdings]))["engines"]
            held = held_text(document["groups"])
        return {
            "name": told["engine_id"],
            "model": told["model"],
            "session": told["session"],
            "publishes": engine.publishes,
            "asks": engine.asks,
            "keeps": engine.keeps,
            "agents": [rank.rank in engine.agents for rank in engine.layout.ranks],
            "held": f"holds {held or 'nothing'}",
        }

    def _table(
        self, titles: Sequence[str], handoffs: Iterable[Handoff], several: bool, count: int = 0
    ) -> Values:
        """Return rows of handoffs: the key of each, its texts, and the amounts to sort by."""
        granting, now_s = self._hub.directory.granting, self._hub.now_s()
        infos = [handoff_info(handoff, granting, now_s) for handoff in handoffs]
        told = handoffs_json(pb.ListHandoffsResponse(handoffs=infos))["handoffs"]
        if several:
            name_tenants(told, "source_engine", "destination_engine")
        columns = [(title, COLUMNS[title].amount) for title in titles]
        amounts = [(title, get) for title, get in columns if get is not None]
        return {
            "titles": titles,
            "rows": [
                {
                    # A publication and each of its deliveries have a row, under one id.
                    "key": f"{entry['tenant']} {entry['handoff_id']} {entry['number']}",
                    "tenant": entry["tenant"],
                    "texts": list(map(shown, row(entry, titles))),
                    "amounts": {title: get(entry) for title, get in amounts},
                }
                for entry in told
            ],
            "note": f"the oldest {len(told)} of {count}" if count > len(told) else "",
        }


def _story(handoff: Values) -> Values:
    """Return what the page draws of a handoff, and of its deliveries."""
    return {
        "id": handoff["handoff_id"],
        "state": handoff["state"],
        "about": about(handoff),
        "charts": [
            {
                "title": chart.title,
                "ticks": [duration_text(chart.lasted_s * at / 4) for at in range(5)],
                "bars": [bar._asdict() for bar in chart.bars],
            }
            for chart in charts(handoff)
        ],
        "timeline": timeline(handoff),
        "deliveries": [_story(delivery) for delivery in handoff["deliveries"]],
    }


def _traffic(traffic: Values, now_s: float) -> Values:
    """Return the lines of the charts, with a text for each of their points."""
    step_s, count = traffic["step_s"], len(traffic["steps"])
    # The last step is not over: its rates are those of the time that it has had.
    last_s = max(now_s % step_s, step_s / 2)
    return {
        "step_s": step_s,
        "ago": [duration_text((count - 1 - at) * step_s) for at in range(count)],
        "lines": {
            line.title: {
                "values": line.values,
                "texts": ["-" if at is None else line.words(at) for at in line.values],
                "top": line.top,
            }
            for line in series(traffic, last_s)
        },
    }


def _fleet(report: FleetReport | None) -> Values | None:
    """Return the broker's standing among others; None: it is the only broker."""
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


def _lines(handoffs: Iterable[Handoff], several: bool) -> list[Values]:
    """Count handoffs under way by their engines, which may be unknown, and by their state."""

    def name(engine: EngineRecord | None) -> str | None:
        if engine is None:
            return None
        key: EngineKey = engine.key
        return f"{key.tenant}/{key.engine_id}" if several else key.engine_id

    counts = Counter((h.source, h.destination, h.state) for h in handoffs)
    return [
        {"from": name(source), "to": name(destination), "state": state.value, "count": count}
        for (source, destination, state), count in counts.items()
    ]
