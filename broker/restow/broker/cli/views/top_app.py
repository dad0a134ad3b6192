"""`Top` is the screen of ``restow top``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import DataTable, Footer, Static

from restow.broker.cli.views.handoff_columns import UNDER_WAY
from restow.broker.cli.views.listing import colored, shortened
from restow.broker.cli.views.top_tables import (
    PAIR_COLUMNS,
    Look,
    handoff_rows,
    headline,
    pair_rows,
)
from restow.broker.errors import RestowError

GAP = "   "
SCROLLBAR, PADDING = 2, 2
"""Columns that a table takes beside its texts, and beside each of its columns."""
NARROW = 120
"""Below so many columns, what a handoff waits for is left out, and the pairs show less."""


class Top(App[None]):
    """Shows what goes on in a broker, anew every second."""

    TITLE = "restow top"
    CSS = """
    #figures { height: auto; padding: 0 1; }
    #handoffs { height: 2fr; }
    #pairs { height: 1fr; border-top: solid $primary-darken-1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("p", "pause", "Pause"),
    ]

    def __init__(self, look: Callable[[], Look], every_s: float = 1.0) -> None:
        """``look`` asks the broker, in a thread of its own; it may raise a `RestowError`."""
        super().__init__()
        self._look, self._every_s = look, every_s
        self._before: Look | None = None
        self._paused = False

    def compose(self) -> ComposeResult:
        """Yield the widgets: statistics, what is under way, and who is slow."""
        yield Static(id="figures")
        yield DataTable(id="handoffs", cursor_type="row", zebra_stripes=True)
        yield DataTable(id="pairs", cursor_type="none")
        yield Footer()

    async def on_mount(self) -> None:
        """Look at once, and then regularly."""
        wide = self.size.width >= NARROW
        self._handoff_columns = UNDER_WAY if wide else UNDER_WAY[:-1]
        self.query_one("#handoffs", DataTable).add_columns(*self._handoff_columns)
        self.query_one("#pairs", DataTable).add_columns(*PAIR_COLUMNS)
        self.run_worker(self._go_on(), exclusive=True)

    def action_pause(self) -> None:
        """Let the screen stand still, or go on."""
        self._paused = not self._paused

    async def _go_on(self) -> None:
        while True:
            if not self._paused:
                await self.look()
            await asyncio.sleep(self._every_s)

    async def look(self) -> None:
        """Ask once, and show it; of a broker that does not answer, what was seen last stays."""
        words, now = "", None
        try:
            now = await asyncio.to_thread(self._look)
        except RestowError as error:
            words = f"{error.reason}: {error.message}"
        if not self.is_running:  # the screen may have gone meanwhile
            return
        if now is None:
            self.query_one("#figures", Static).update(Text(words, style="bold red"))
        else:
            self._show(now)
            self._before = now

    def _show(self, now: Look) -> None:
        figures, left = Text(), self.size.width - 2
        for name, value in headline(self._before, now):
            # Lines break between figures, and not within.
            needed = len(GAP) + len(name) + 1 + len(value)
            if figures:
                figures.append("\n" if needed > left else GAP)
            left = (self.size.width - 2 if needed > left else left) - needed
            figures.append(f"{name} ", style="bold")
            figures.append(value)
        self.query_one("#figures", Static).update(figures)
        shown = len(self._handoff_columns)
        rows = [row[:shown] for row in handoff_rows(now)]
        others = zip(*([self._handoff_columns[1:]] + [row[1:] for row in rows]), strict=True)
        room = self.size.width - SCROLLBAR - PADDING * shown
        room -= sum(max(map(len, column)) for column in others)
        ids = shortened([row[0] for row in rows], room)
        _fill(
            self.query_one("#handoffs", DataTable),
            [[name, colored(row[1]), *row[2:]] for name, row in zip(ids, rows, strict=True)],
        )
        _fill(self.query_one("#pairs", DataTable), pair_rows(now))


def _fill(table: DataTable[str | Text], rows: Sequence[Sequence[str | Text]]) -> None:
    """Fill a table anew, and stay where the reader was."""
    at, row = table.scroll_y, table.cursor_row
    table.clear()
    for cells in rows:
        # Textual reads markup in cells that are bare text: names may hold some.
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))
    if row and row < len(rows):
        table.move_cursor(row=row, scroll=False)
    table.scroll_to(y=at, animate=False)
