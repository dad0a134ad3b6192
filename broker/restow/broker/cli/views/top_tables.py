"""These functions make what ``restow top`` shows of what the broker says; they know no screen."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from restow.broker.cli.views.admin_json import ENDS
from restow.broker.cli.views.handoff_columns import UNDER_WAY, handoff_row
from restow.broker.draw.bytes_and_seconds import duration_text, rate_text

PAIR_COLUMNS = ("from", "to", "reads at", "median", "slowest", "done")


@dataclass(frozen=True, slots=True)
class Look:
    """Holds what was seen at one time, in the form of the commands' ``--json``."""

    at_s: float
    status: dict[str, Any]
    engines: Sequence[dict[str, Any]]
    handoffs: Sequence[dict[str, Any]]
    """Those under way, and the latest ends."""
    hidden: str = ""
    """Words on tenants whose engines and handoffs are not among these; empty: none."""

    @property
    def live(self) -> list[dict[str, Any]]:
        """Those under way, the oldest first."""
        under_way = [one for one in self.handoffs if one["state"] not in ENDS]
        return sorted(under_way, key=lambda one: -float(one["age_s"]))


def headline(before: Look | None, now: Look) -> list[tuple[str, str]]:
    """Return names and values of the figures above the tables; rates are those since ``before``."""
    status = now.status
    ready = sum(one["session"] and one["agents"] == one["ranks"] for one in now.engines)
    agents = sum(one["agents"] for one in now.engines)
    leases = [one["lease_s"] for one in now.live if one["lease_s"] is not None]
    ended = status["handoffs_ended"]
    rates = "-", "-"
    if before is not None and _same_life(before, now):
        passed_s = now.at_s - before.at_s
        count = sum(ended.values()) - sum(before.status["handoffs_ended"].values())
        read_bytes = status["bytes_read"] - before.status["bytes_read"]
        rates = f"{count / passed_s:.1f}/s", rate_text(read_bytes / passed_s)
    return [
        ("broker", f"{status['broker']}, up {duration_text(status['uptime_s'])}"),
        ("engines", f"{ready} of {len(now.engines)} ready, {agents} agents"),
        ("live", str(status["handoffs_live"])),
        ("quarantine", str(status["handoffs_quarantined"])),
        ("shortest lease", duration_text(max(0.0, min(leases))) if leases else "-"),
        ("ends", rates[0]),
        ("read", rates[1]),
        ("ended", ", ".join(f"{count} {state}" for state, count in ended.items() if count) or "-"),
        *([("draining", "nothing is granted")] if status["draining"] else []),
        *([("listed", now.hidden)] if now.hidden else []),
    ]


def _same_life(before: Look, now: Look) -> bool:
    same = before.status["broker_epoch"] == now.status["broker_epoch"]
    return same and now.at_s > before.at_s


def handoff_rows(look: Look) -> list[tuple[str, ...]]:
    """Return a row of `UNDER_WAY` for each that is under way, the oldest first."""
    return [tuple(handoff_row(one, UNDER_WAY)) for one in look.live]


def pair_rows(look: Look) -> list[tuple[str, ...]]:
    """Return a row of `PAIR_COLUMNS` for each two engines that handed over, the slowest first.

    The slowest by bytes a second. Transfers last from the grant to the last rank's report.
    """
    found: defaultdict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for one in look.handoffs:
        if one["state"] == "DONE" and one["transfer_s"]:
            found[one["source_engine"], one["destination_engine"]].append(one)
    rows = []
    for (source, destination), ends in found.items():
        seconds = [float(one["transfer_s"]) for one in ends]
        rate = sum(one["bytes"] for one in ends) / sum(seconds)
        lasted = duration_text(statistics.median(seconds)), duration_text(max(seconds))
        rows.append((rate, (source, destination, rate_text(rate), *lasted, str(len(ends)))))
    return [row for _, row in sorted(rows)]
