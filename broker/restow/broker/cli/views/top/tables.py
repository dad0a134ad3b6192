"""These functions make what ``restow top`` shows of what the broker says; they know no screen."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from restow.broker.cli.views.admin_json import ENDS
from restow.broker.cli.views.fleet_views import standing_text
from restow.broker.cli.views.handoff_columns import UNDER_WAY, handoff_row
from restow.broker.cli.views.prefix_views import held_text
from restow.broker.draw.bytes_and_seconds import duration_text, rate_text, size_text

PAIR_COLUMNS = ("from", "to", "reads at", "p50", "p99", "done", "failed", "read")
"""What ended in the last quarter of an hour."""
HOLDERS = 2
"""As many of those that hold prefixes as one line has room for."""
NO_TRAFFIC: dict[str, Any] = {"step_s": 0.0, "steps": [], "pairs": [], "pairs_left_out": 0}
SORTED_BY: dict[str, Callable[[dict[str, Any]], Any]] = {
    "lease": lambda one: math.inf if one["lease_s"] is None else one["lease_s"],
    "state": lambda one: one["state"],
    "from": lambda one: one["source_engine"] or "",
    "to": lambda one: one["destination_engine"] or "",
    "tokens": lambda one: -(one["position_tokens"] or 0),
}
"""Else the oldest come first."""


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
    traffic: dict[str, Any] = field(default_factory=lambda: NO_TRAFFIC)
    all_tenants: bool = False
    """Whether names of engines have their tenants before them."""
    holdings: Sequence[dict[str, Any]] = ()
    """What engines say that they hold of prefixes."""

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
    pairs, left_out = len(now.traffic["pairs"]), now.traffic["pairs_left_out"]
    rates = "-", "-"
    if before is not None and _same_life(before, now):
        passed_s = now.at_s - before.at_s
        count = sum(ended.values()) - sum(before.status["handoffs_ended"].values())
        read_bytes = status["bytes_read"] - before.status["bytes_read"]
        rates = f"{count / passed_s:.1f}/s", rate_text(read_bytes / passed_s)
    return [
        ("broker", _broker(status)),
        ("engines", f"{ready} of {len(now.engines)} ready, {agents} agents"),
        ("live", str(status["handoffs_live"])),
        ("quarantine", str(status["handoffs_quarantined"])),
        ("shortest lease", duration_text(max(0.0, min(leases))) if leases else "-"),
        ("ends", rates[0]),
        ("read", rates[1]),
        ("ended", ", ".join(f"{count} {state}" for state, count in ended.items() if count) or "-"),
        *([("held", _held(now))] if now.holdings else []),
        *([("draining", "nothing is granted")] if status["draining"] else []),
        *([("listed", now.hidden)] if now.hidden else []),
        *([("pairs", f"the busiest {pairs} of {pairs + left_out}")] if left_out else []),
    ]


def _broker(status: dict[str, Any]) -> str:
    words = f"{status['broker']}, up {duration_text(status['uptime_s'])}"
    if status["membership"] is None:
        return words
    return f"{words}, epoch {status['broker_epoch']}, {standing_text(status['membership']).plain}"


def _held(now: Look) -> str:
    """Who holds most, stores above all: so many tokens in blocks, and so many snapshots."""
    most = sorted(
        now.holdings, key=lambda one: -max((g["count"] for g in one["groups"]), default=0)
    )
    shown = [f"{one['engine_id']} {held_text(one)}" for one in most[:HOLDERS]]
    left_out = len(most) - HOLDERS
    return "; ".join(shown) + (f"; {left_out} more" if left_out > 0 else "")


def _same_life(before: Look, now: Look) -> bool:
    same = before.status["broker_epoch"] == now.status["broker_epoch"]
    return same and now.at_s > before.at_s


def chosen(look: Look, words: str = "", order: str = "") -> list[dict[str, Any]]:
    """Return those under way whose row has all ``words``, by a column, the oldest first."""
    wanted = words.lower().split()
    found = []
    for one in look.live:
        text = " ".join(handoff_row(one, UNDER_WAY)).lower()
        if all(word in text for word in wanted):
            found.append(one)
    key = SORTED_BY.get(order)
    return sorted(found, key=key) if key else found


def handoff_rows(handoffs: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return a row of `UNDER_WAY` for each."""
    return [tuple(handoff_row(one, UNDER_WAY)) for one in handoffs]


def pair_rows(look: Look, words: str = "") -> list[tuple[str, ...]]:
    """Return a row of `PAIR_COLUMNS` for each two engines that handed over lately.

    The slowest by bytes a second come first; transfers last from the grant to the last rank's
    report. It does not depend on which handoffs are listed.
    """
    wanted, found = words.lower().split(), []
    for one in look.traffic["pairs"]:
        names = [one["source_engine"], one["destination_engine"]]
        if look.all_tenants:
            names = [f"{one['tenant']}/{name}" for name in names]
        if not all(word in " ".join(names).lower() for word in wanted):
            continue
        rate = one["bytes_per_second"]
        lasted = [_known(one[name], duration_text) for name in ("p50_s", "p99_s")]
        counts = str(one["done"]), str(one["failed"] or "-"), size_text(one["bytes"])
        found.append((rate or 0.0, (*names, _known(rate, rate_text), *lasted, *counts)))
    return [row for _, row in sorted(found)]


def _known(value: float | None, words: Callable[[float], str]) -> str:
    return "-" if value is None else words(value)
