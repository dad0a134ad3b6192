"""`put_top` prints one look of ``restow top -b``: for pipes, logs and scripts."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from restow.broker.cli.views.handoff_columns import UNDER_WAY
from restow.broker.cli.views.listing import console, listing, put
from restow.broker.cli.views.top.tables import (
    PAIR_COLUMNS,
    Look,
    chosen,
    handoff_rows,
    headline,
    pair_rows,
)
from restow.broker.cli.views.top.trends import trend_lines

TRENDS_WIDTH = 100
"""Columns of bars where a line has no end."""


def put_top(before: Look | None, now: Look) -> None:
    """Print figures, what is under way and who is slow; then an empty line."""
    to, figures = console(), headline(before, now)
    names = max(len(name) for name, _ in figures)
    put(
        to,
        *(f"{name:{names}}  {value}" for name, value in figures),
        *_trends(now, min(to.width, TRENDS_WIDTH)),
        *_table(UNDER_WAY, handoff_rows(chosen(now)), to.width, ids="handoff", words="waits for"),
        *_table(PAIR_COLUMNS, pair_rows(now), to.width),
        "",
    )


def _trends(now: Look, width: int) -> list[RenderableType]:
    lines = trend_lines(now.traffic, width)
    return [Text(), Text("the last quarter of an hour", style="bold"), *lines] if lines else []


def _table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int,
    *,
    ids: str = "",
    words: str | None = None,
) -> list[RenderableType]:
    return [Text(), listing(columns, rows, width, ids=ids, words=words)] if rows else []
