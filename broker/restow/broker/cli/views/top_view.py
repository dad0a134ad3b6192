"""Show what goes on in a broker: the figures, rows and bars of ``restow top``, and its lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from restow.broker.cli.views.listing import console, listing, put
from restow.broker.cli.views.tables import standing_text
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
"""Number of engines, of those that hold most prefixes, that one line has room for."""
SORTED_BY = {"lease": 1, "state": 1, "from": 1, "to": 1, "tokens": -1}
"""Columns that rows may be sorted by: upwards for 1, downwards for -1."""
CELLS = " ▁▂▃▄▅▆▇█"
KEPT_S = 900
"""Seconds that a line of bars shows."""
LEAST_CELLS = 8
BARS_WIDTH = 100
"""Columns of bars where the length of lines is not limited."""


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
    """Words on tenants whose engines and handoffs are not shown; empty if there are none."""

    @property
    def live(self) -> list[Values]:
        """Handoffs under way, the oldest first."""
        under_way = [handoff for handoff in self.handoffs if handoff["state"] not in ENDS]
        return sorted(under_way, key=lambda handoff: -float(handoff["age_s"]))


def headline(now: Look) -> list[Figure]:
    """Return the figures above the tables."""
    status, pairs = now.status, len(now.traffic["pairs"])
    broker = f"{status['broker']}, up {duration_text(status['uptime_s'])}"
    if status["membership"] is not None:
        standing = standing_text(status["membership"]).plain
        broker = f"{broker}, epoch {status['broker_epoch']}, {standing}"
    leases = [handoff["lease_s"] for handoff in now.live if handoff["lease_s"] is not None]
    shown = [Figure("broker", broker)]
    shown += figures(status, now.engines, now.traffic, min(leases, default=None))
    if now.holdings:
        shown.append(Figure("held", _held(now.holdings)))
    if status["draining"]:
        shown.append(Figure("draining", "nothing is granted", bad=True))
    if now.hidden:
        shown.append(Figure("listed", now.hidden))
    if left_out := now.traffic["pairs_left_out"]:
        shown.append(Figure("pairs", f"the busiest {pairs} of {pairs + left_out}"))
    return shown


def _held(holdings: Sequence[Values]) -> str:
    """Return which engines hold most prefixes, and how much."""
    most = sorted(
        holdings, key=lambda engine: -max((group["count"] for group in engine["groups"]), default=0)
    )
    shown = [f"{engine['engine_id']} {held_text(engine['groups'])}" for engine in most[:HOLDERS]]
    left_out = len(most) - HOLDERS
    return "; ".join(shown) + (f"; {left_out} more" if left_out > 0 else "")


def chosen(look: Look, words: str = "", order: str = "") -> list[Values]:
    """Return the handoffs under way that have all ``words``, by a column or the oldest first."""
    matching = [handoff for handoff in look.live if has_words(row(handoff, UNDER_WAY), words)]
    return sorted(matching, key=lambda handoff: _key(handoff, order)) if order else matching


def _key(handoff: Values, order: str) -> Any:
    column = COLUMNS[order]
    if column.amount is None:
        return column.text(handoff)
    amount = column.amount(handoff)
    return math.inf if amount is None else amount * SORTED_BY[order]


def pair_rows(look: Look, words: str = "") -> list[tuple[str, ...]]:
    """Return a row of `PAIRS` for each pair that has all ``words``, the slowest first."""
    slowest = sorted(look.traffic["pairs"], key=lambda pair: pair["bytes_per_second"] or 0.0)
    rows = [pair_row(pair) for pair in slowest]
    return [texts for texts in rows if has_words(texts[:2], words)]


def bars(values: Sequence[float | None], cells: int) -> str:
    """Return values as bars; a cell for several values shows the highest, so that peaks stay.

    >>> bars([0, 1, 2, None, 8], 5), bars([1, 8, 2, 2], 2)
    (' ▁▂ █', '█▂')
    """
    known = [0.0 if value is None else value for value in values]
    top, count = max(known, default=0.0), len(known)
    cells = min(cells, count)
    blocks = []
    for at in range(cells):
        highest = max(known[at * count // cells : (at + 1) * count // cells])
        # Whatever is not zero has a bar, however low.
        level = max(1, round(highest / top * (len(CELLS) - 1))) if highest else 0
        blocks.append(CELLS[level])
    return "".join(blocks)


def trend_lines(traffic: Values, width: int) -> list[str]:
    """Return lines of title, bars and highest value, side by side where there is room."""
    if not traffic["steps"]:
        return []
    shown = series(traffic)
    title, top = max(len(trend.title) for trend in shown), max(len(trend.top) for trend in shown)
    beside = min(len(shown), max(1, width // (title + top + LEAST_CELLS + 4)))
    room = max(LEAST_CELLS, width // beside - title - top - 4)
    cells = min(round(KEPT_S / traffic["step_s"]), room)
    texts = [
        f"{trend.title:{title}} {bars(trend.values, cells):>{cells}} {trend.top:{top}}"
        for trend in shown
    ]
    return ["  ".join(texts[at : at + beside]).rstrip() for at in range(0, len(texts), beside)]


def put_top(now: Look) -> None:
    """Print one look of ``restow top -b``, then an empty line: for pipes, logs and scripts."""
    to, shown = console(), headline(now)
    width = max(len(figure.title) for figure in shown)
    lines: list[RenderableType] = [f"{figure.title:{width}}  {figure.text}" for figure in shown]
    if trends := trend_lines(now.traffic, min(to.width, BARS_WIDTH)):
        lines += [Text(), Text("the last quarter of an hour", style="bold"), *trends]
    if handoffs := [row(handoff, UNDER_WAY) for handoff in chosen(now)]:
        table = listing(UNDER_WAY, handoffs, to.width, ids="handoff", words="waits for")
        lines += [Text(), table]
    if pairs := pair_rows(now):
        lines += [Text(), listing(PAIRS, pairs, to.width)]
    put(to, *lines, "")
