"""Draw the screen of ``restow top``, and the screen of a single handoff above it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import ClassVar

from rich.console import Group, RenderableType
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Input, Static

from restow.broker.cli.views.listing import colored, shortened
from restow.broker.cli.views.tables import handoff_lines
from restow.broker.cli.views.top_view import (
    SORTED_BY,
    Look,
    chosen,
    headline,
    pair_rows,
    trend_lines,
)
from restow.broker.display.documents import Values
from restow.broker.display.rows import PAIRS, UNDER_WAY, Figure, row
from restow.broker.errors import RestowError

GAP = "   "
SCROLLBAR, PADDING = 2, 2
"""Terminal columns that a table needs beside its cells, and a cell beside its text."""
NARROW = 120
"""Leave out progress and what a handoff waits for on a screen of fewer columns."""


class Top(App[None]):
    """Show what goes on in a broker, and look again every second."""

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
        get_handoff: Callable[[str, str], Values] | None = None,
    ) -> None:
        """Show what ``look`` returns; for Enter, ``get_handoff`` takes a tenant and an id.

        Both ask the broker, in a thread of their own, and may raise a `RestowError`.
        """
        super().__init__()
        self._look, self._every_s, self._get_handoff = look, every_s, get_handoff
        self._seen: Look | None = None
        self._trouble = ""
        """The error of the latest look."""
        self._paused = False
        self._order = ""
        self._listed: list[Values] = []
        """The handoffs whose rows are shown."""

    def compose(self) -> ComposeResult:
        """Yield the widgets: statistics, what is under way, and which pairs are slow."""
        yield Static(id="figures")
        yield Static(id="trends")
        yield Input(id="filter", placeholder="words that a row must have; Escape: all rows")
        yield DataTable(id="handoffs", cursor_type="row", zebra_stripes=True)
        yield DataTable(id="pairs", cursor_type="none")
        yield Footer()

    async def on_mount(self) -> None:
        """Start to look."""
        wide = self.size.width >= NARROW
        self._handoff_columns = UNDER_WAY if wide else UNDER_WAY[:-2]
        self.query_one("#handoffs", DataTable).add_columns(*self._handoff_columns)
        self.query_one("#pairs", DataTable).add_columns(*PAIRS)
        self.query_one("#handoffs", DataTable).focus()
        self.run_worker(self._go_on(), exclusive=True)

    def action_pause(self) -> None:
        """Stop looking, or go on."""
        self._paused = not self._paused

    def action_filter(self) -> None:
        """Ask for words that rows must have."""
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
        """Sort by the next column of `SORTED_BY`, and after the last column by age."""
        orders = ["", *SORTED_BY]
        self._order = orders[(orders.index(self._order) + 1) % len(orders)]
        self._show_again()

    def on_input_changed(self, _: Input.Changed) -> None:
        """Show the rows that have the words."""
        self._show_again()

    def on_input_submitted(self, _: Input.Submitted) -> None:
        """Return to the table."""
        self.query_one("#handoffs", DataTable).focus()

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Show one handoff, with how its time was spent."""
        if self._get_handoff is not None and event.cursor_row < len(self._listed):
            listed = self._listed[event.cursor_row]
            self.push_screen(
                HandoffScreen(self._get_handoff, listed["tenant"], listed["handoff_id"])
            )

    def _show_again(self) -> None:
        if self._seen is not None:
            self._show(self._seen)

    async def _go_on(self) -> None:
        while True:
            if not self._paused:
                await self.look()
            await asyncio.sleep(self._every_s)

    async def look(self) -> None:
        """Ask once and show the answer; keep the last answer if the broker does not answer."""
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
            self._seen = now
            self._show(now)

    def _show_figures(self, figures: Text) -> None:
        # Update the lowest screen: another screen may lie on it.
        shown = Text(self._trouble, style="bold red") if self._trouble else figures
        self.screen_stack[0].query_one("#figures", Static).update(shown)

    def _show(self, now: Look) -> None:
        base, words = self.screen_stack[0], self._words()
        self._show_figures(self._figures(now))
        base.query_one("#trends", Static).update(
            Text("\n".join(trend_lines(now.traffic, self.size.width - 2)))
        )
        self._listed = chosen(now, words, self._order)
        titles = self._handoff_columns
        rows = [row(handoff, titles) for handoff in self._listed]
        others = zip(titles[1:], *(texts[1:] for texts in rows), strict=True)
        room = self.size.width - SCROLLBAR - PADDING * len(titles)
        room -= sum(max(map(len, column)) for column in others)
        ids = shortened([texts[0] for texts in rows], room)
        _fill(
            base.query_one("#handoffs", DataTable),
            [[name, colored(texts[1]), *texts[2:]] for name, texts in zip(ids, rows, strict=True)],
        )
        _fill(base.query_one("#pairs", DataTable), pair_rows(now, words))

    def _words(self) -> str:
        return str(self.screen_stack[0].query_one("#filter", Input).value)

    def _figures(self, now: Look) -> Text:
        figures, left = Text(), self.size.width - 2
        more = [Figure("sorted", self._order)] if self._order else []
        for title, value, bad in [*headline(now), *more]:
            # A line breaks between two figures only.
            needed = len(GAP) + len(title) + 1 + len(value)
            if figures:
                figures.append("\n" if needed > left else GAP)
            left = (self.size.width - 2 if needed > left else left) - needed
            figures.append(f"{title} ", style="bold")
            figures.append(value, style="red" if bad else "")
        return figures


def _fill(table: DataTable[str | Text], rows: Sequence[Sequence[str | Text]]) -> None:
    """Fill a table again, and keep the reader's place."""
    at, cursor = table.scroll_y, table.cursor_row
    table.clear()
    for cells in rows:
        # Textual reads markup in cells that are bare text: names may hold markup.
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))
    if cursor and cursor < len(rows):
        table.move_cursor(row=cursor, scroll=False)
    table.scroll_to(y=at, animate=False)


class HandoffScreen(ModalScreen[None]):
    """Show how a handoff's time was spent and what happened to it; look again every second."""

    CSS = """
    HandoffScreen > VerticalScroll { background: $surface; border: round $primary; padding: 0 1;
                                     height: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss", "Back"),
        Binding("q", "dismiss", "Back", show=False),
    ]

    def __init__(
        self, get_handoff: Callable[[str, str], Values], tenant: str, handoff_id: str
    ) -> None:
        """Show what ``get_handoff`` returns for the handoff."""
        super().__init__()
        self._get_handoff, self._tenant, self._handoff_id = get_handoff, tenant, handoff_id
        self._text = Static(id="handoff")

    def compose(self) -> ComposeResult:
        """Yield the text, which may be longer than the screen."""
        with VerticalScroll():
            yield self._text
        yield Footer()

    async def on_mount(self) -> None:
        """Start to look."""
        self.run_worker(self._go_on(), exclusive=True)

    async def _go_on(self) -> None:
        while True:
            try:
                value = await asyncio.to_thread(self._get_handoff, self._tenant, self._handoff_id)
                shown: RenderableType = Group(*handoff_lines(value, self.size.width - 6))
            except RestowError as error:
                shown = Text(f"{error.reason}: {error.message}", style="bold red")
            if not self.is_attached:  # the user may have left the screen meanwhile
                return
            self._text.update(shown)
            await asyncio.sleep(1)
