"""Show what goes on in a broker: the figures, rows and bars of ``restow top``, and its lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from restow.broker.cli.views.fleet_views import standing_text
from restow.broker.cli.views.listing import console, listing, put
from restow.broker.display.documents import ENDS, Values
from restow.broker.display.rows import (
    COLUMNS,
    PAIRS,
    UNDER_WAY,
    Figure,
    figures,
    has_words,
    held_text,
    pair_row,
    row,
    series,
)
from restow.broker.draw.bytes_and_seconds import duration_text

HOLDERS = 2
"""Engines of those that hold most prefixes for which one line has room."""
SORTED_BY = {"lease": 1, "state": 1, "from": 1, "to": 1, "tokens": -1}
"""Columns that rows may be sorted by: upwards, or downwards where it is -1."""
CELLS = " ▁▂▃▄▅▆▇█"
KEPT_S = 900
"""Seconds that a line of bars shows."""
LEAST_CELLS = 8
BARS_WIDTH = 100
"""Columns of bars where a line has no end."""


@dataclass(frozen=True, slots=True)
class Look:
    """Hold what the broker told at one time, in the documents of the commands."""

    status: Values
    engines: Sequence[Values]
    handoffs: Sequence[Values]
    """Handoffs under way, and the latest ends."""
    traffic: Values
    holdings: Sequence[Values] = ()
    hidden: str = ""
    """Words on tenants whose engines and handoffs are not shown; empty: there are none."""

    @property
    def live(self) -> list[Values]:
        """Handoffs under way, the oldest first."""
        under_way = [one for one in self.handoffs if one["state"] not in ENDS]
        return sorted(under_way, key=lambda one: -float(one["age_s"]))


def headline(now: Look) -> list[Figure]:
    """Return the figures above the tables."""
    status, pairs = now.status, len(now.traffic["pairs"])
    broker = f"{status['broker']}, up {duration_text(status['uptime_s'])}"
    if status["membership"] is not None:
        standing = standing_text(status["membership"]).plain
        broker = f"{broker}, epoch {status['broker_epoch']}, {standing}"
    leases = [one["lease_s"] for one in now.live if one["lease_s"] is not None]
    found = [Figure("broker", broker)]
    found += figures(status, now.engines, now.traffic, min(leases, default=None))
    if now.holdings:
        found.append(Figure("held", _held(now.holdings)))
    if status["draining"]:
        found.append(Figure("draining", "nothing is granted", bad=True))
    if now.hidden:
        found.append(Figure("listed", now.hidden))
    if left_out := now.traffic["pairs_left_out"]:
        found.append(Figure("pairs", f"the busiest {pairs} of {pairs + left_out}"))
    return found


def _held(holdings: Sequence[Values]) -> str:
    """Return which engines hold most prefixes, and how much."""
    most = sorted(holdings, key=lambda one: -max((g["count"] for g in one["groups"]), default=0))
    shown = [f"{one['engine_id']} {held_text(one['groups'])}" for one in most[:HOLDERS]]
    left_out = len(most) - HOLDERS
    return "; ".join(shown) + (f"; {left_out} more" if left_out > 0 else "")


def chosen(look: Look, words: str = "", order: str = "") -> list[Values]:
    """Return the handoffs under way that have all ``words``, by a column or the oldest first."""
    found = [one for one in look.live if has_words(row(one, UNDER_WAY), words)]
    return sorted(found, key=lambda one: _key(one, order)) if order else found


def _key(one: Values, order: str) -> Any:
    column = COLUMNS[order]
    if column.amount is None:
        return column.text(one)
    amount = column.amount(one)
    return math.inf if amount is None else amount * SORTED_BY[order]


def pair_rows(look: Look, words: str = "") -> list[tuple[str, ...]]:
    """Return a row of `PAIRS` for each pair that has all ``words``, the slowest first."""
    slowest = sorted(look.traffic["pairs"], key=lambda one: one["bytes_per_second"] or 0.0)
    rows = [pair_row(one) for one in slowest]
    return [texts for texts in rows if has_words(texts[:2], words)]


def bars(values: Sequence[float | None], cells: int) -> str:
    """Return values as bars; a cell of several values shows the highest, so that peaks stay.

    >>> bars([0, 1, 2, None, 8], 5), bars([1, 8, 2, 2], 2)
    (' ▁▂ █', '█▂')
    """
    known = [0.0 if one is None else one for one in values]
    top, count = max(known, default=0.0), len(known)
    cells = min(cells, count)
    found = []
    for at in range(cells):
        highest = max(known[at * count // cells : (at + 1) * count // cells])
        # Whatever is not zero has a bar, however low.
        level = max(1, round(highest / top * (len(CELLS) - 1))) if highest else 0
        found.append(CELLS[level])
    return "".join(found)


def trend_lines(traffic: Values, width: int) -> list[str]:
    """Return lines of title, bars and highest value, side by side where there is room."""
    if not traffic["steps"]:
        return []
    shown = series(traffic)
    title, top = max(len(one.title) for one in shown), max(len(one.top) for one in shown)
    beside = min(len(shown), max(1, width // (title + top + LEAST_CELLS + 4)))
    room = max(LEAST_CELLS, width // beside - title - top - 4)
    cells = min(round(KEPT_S / traffic["step_s"]), room)
    texts = [
        f"{one.title:{title}} {bars(one.values, cells):>{cells}} {one.top:{top}}" for one in shown
    ]
    return ["  ".join(texts[at : at + beside]).rstrip() for at in range(0, len(texts), beside)]


def put_top(now: Look) -> None:
    """Print one look of ``restow top -b``, then an empty line: for pipes, logs and scripts."""
    to, shown = console(), headline(now)
    width = max(len(one.title) for one in shown)
    lines: list[RenderableType] = [f"{one.title:{width}}  {one.text}" for one in shown]
    if trends := trend_lines(now.traffic, min(to.width, BARS_WIDTH)):
        lines += [Text(), Text("the last quarter of an hour", style="bold"), *trends]
    if handoffs := [row(one, UNDER_WAY) for one in chosen(now)]:
        table = listing(UNDER_WAY, handoffs, to.width, ids="handoff", words="waits for")
        lines += [Text(), table]
    if pairs := pair_rows(now):
        lines += [Text(), listing(PAIRS, pairs, to.width)]
    put(to, *lines, "")
