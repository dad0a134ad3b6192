"""`Top` is the screen of ``restow top``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import DataTable, Footer, Input, Static

from restow.broker.cli.views.handoff_columns import UNDER_WAY
from restow.broker.cli.views.listing import colored, shortened
from restow.broker.cli.views.top.one_handoff import HandoffScreen
from restow.broker.cli.views.top.tables import (
    PAIR_COLUMNS,
    SORTED_BY,
    Look,
    chosen,
    handoff_rows,
    headline,
    pair_rows,
)
from restow.broker.cli.views.top.trends import trend_lines
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
    #figures, #trends { height: auto; padding: 0 1; }
    #trends { color: $text-accent; }
    #filter { display: none; height: 1; border: none; padding: 0 1; }
    #filter.shown { display: block; }
    #handoffs { height: 2fr; }
    #pairs { height: 1fr; border-top: solid $primary-darken-1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("p", "pause", "Pause"),
        Binding("slash", "filter", "Filter"),
        Binding("s", "sort", "Sort"),
        Binding("escape", "unfilter", "All", show=False),
    ]

    def __init__(
        self,
        look: Callable[[], Look],
        every_s: float = 1.0,
        one: Callable[[str, str], dict[str, Any]] | None = None,
    ) -> None:
        """``look`` asks the broker, in a thread of its own; it may raise a `RestowError`.

        ``one`` asks it for one handoff, by tenant and id, at Enter.
        """
        super().__init__()
        self._look, self._every_s, self._one = look, every_s, one
        self._seen: tuple[Look | None, Look] | None = None
        """The latest two looks, of which rates are made."""
        self._trouble = ""
        """Why the latest look failed."""
        self._paused = False
        self._order = ""
        self._listed: list[dict[str, Any]] = []
        """The handoffs whose rows are shown."""

    def compose(self) -> ComposeResult:
        """Yield the widgets: statistics, what is under way, and who is slow."""
        yield Static(id="figures")
        yield Static(id="trends")
        yield Input(id="filter", placeholder="words that a row must have; Escape: all rows")
        yield DataTable(id="handoffs", cursor_type="row", zebra_stripes=True)
        yield DataTable(id="pairs", cursor_type="none")
        yield Footer()

    async def on_mount(self) -> None:
        """Look at once, and then regularly."""
        wide = self.size.width >= NARROW
        self._handoff_columns = UNDER_WAY if wide else UNDER_WAY[:-2]
        self.query_one("#handoffs", DataTable).add_columns(*self._handoff_columns)
        self.query_one("#pairs", DataTable).add_columns(*PAIR_COLUMNS)
        self.query_one("#handoffs", DataTable).focus()
        self.run_worker(self._go_on(), exclusive=True)

    def action_pause(self) -> None:
        """Let the screen stand still, or go on."""
        self._paused = not self._paused

    def action_filter(self) -> None:
        """Have words typed that rows must have."""
        words = self.query_one("#filter", Input)
        words.add_class("shown")
        words.focus()

    def action_unfilter(self) -> None:
        """Show all rows again."""
        words = self.query_one("#filter", Input)
        words.value = ""
        words.remove_class("shown")
        self.query_one("#handoffs", DataTable).focus()

    def action_sort(self) -> None:
        """Sort by the next column that is worth it; after the last one, the oldest come first."""
        orders = ["", *SORTED_BY]
        self._order = orders[(orders.index(self._order) + 1) % len(orders)]
        self._show_again()

    def on_input_changed(self, _: Input.Changed) -> None:
        """Show the rows that have the words."""
        self._show_again()

    def on_input_submitted(self, _: Input.Submitted) -> None:
        """Go back to the rows that have the words."""
        self.query_one("#handoffs", DataTable).focus()

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Show one handoff, with how its time was spent."""
        if self._one is not None and event.cursor_row < len(self._listed):
            listed = self._listed[event.cursor_row]
            self.push_screen(HandoffScreen(self._one, listed["tenant"], listed["handoff_id"]))

    def _show_again(self) -> None:
        if self._seen is not None:
            self._show(*self._seen)

    async def _go_on(self) -> None:
        while True:
            if not self._paused:
                await self.look()
            await asyncio.sleep(self._every_s)

    async def look(self) -> None:
        """Ask once, and show it; of a broker that does not answer, what was seen last stays."""
        trouble, now = "", None
        try:
            now = await asyncio.to_thread(self._look)
        except RestowError as error:
            trouble = f"{error.reason}: {error.message}"
        if not self.is_running:  # the screen may have gone meanwhile
            return
        self._trouble = trouble
        if now is None:
            self._show_figures(Text())
        else:
            self._seen = (self._seen[1] if self._seen else None), now
            self._show(*self._seen)

    def _show_figures(self, figures: Text) -> None:
        # Of the lowest screen: another one may lie on it.
        shown = Text(self._trouble, style="bold red") if self._trouble else figures
        self.screen_stack[0].query_one("#figures", Static).update(shown)

    def _show(self, before: Look | None, now: Look) -> None:
        base, words = self.screen_stack[0], self._words()
        self._show_figures(self._figures(before, now))
        base.query_one("#trends", Static).update(
            Text("\n".join(trend_lines(now.traffic, self.size.width - 2)))
        )
        self._listed = chosen(now, words, self._order)
        shown = len(self._handoff_columns)
        rows = [row[:shown] for row in handoff_rows(self._listed)]
        others = zip(*([self._handoff_columns[1:]] + [row[1:] for row in rows]), strict=True)
        room = self.size.width - SCROLLBAR - PADDING * shown
        room -= sum(max(map(len, column)) for column in others)
        ids = shortened([row[0] for row in rows], room)
        _fill(
            base.query_one("#handoffs", DataTable),
            [[name, colored(row[1]), *row[2:]] for name, row in zip(ids, rows, strict=True)],
        )
        _fill(base.query_one("#pairs", DataTable), pair_rows(now, words))

    def _words(self) -> str:
        return str(self.screen_stack[0].query_one("#filter", Input).value)

    def _figures(self, before: Look | None, now: Look) -> Text:
        figures, left = Text(), self.size.width - 2
        more = [("sorted", self._order)] if self._order else []
        for name, value in [*headline(before, now), *more]:
            # Lines break between figures, and not within.
            needed = len(GAP) + len(name) + 1 + len(value)
            if figures:
                figures.append("\n" if needed > left else GAP)
            left = (self.size.width - 2 if needed > left else left) - needed
            figures.append(f"{name} ", style="bold")
            figures.append(value)
        return figures


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
