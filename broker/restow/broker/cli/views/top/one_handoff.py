"""`HandoffScreen` shows one handoff on the screen of ``restow top``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, ClassVar

from rich.console import Group, RenderableType
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Footer, Static

from restow.broker.cli.views.admin_tables import handoff_lines
from restow.broker.errors import RestowError


class HandoffScreen(ModalScreen[None]):
    """Shows how a handoff's time was spent and what happened to it, anew every second."""

    CSS = """
    HandoffScreen > VerticalScroll { background: $surface; border: round $primary; padding: 0 1;
                                     height: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss", "Back"),
        Binding("q", "dismiss", "Back", show=False),
    ]

    def __init__(
        self, one: Callable[[str, str], dict[str, Any]], tenant: str, handoff_id: str
    ) -> None:
        """``one`` asks the broker, in a thread of its own; it may raise a `RestowError`."""
        super().__init__()
        self._one, self._tenant, self._handoff_id = one, tenant, handoff_id
        self._text = Static(id="one")

    def compose(self) -> ComposeResult:
        """Yield the text, which may be longer than the screen."""
        with VerticalScroll():
            yield self._text
        yield Footer()

    async def on_mount(self) -> None:
        """Look at once, and then regularly."""
        self.run_worker(self._go_on(), exclusive=True)

    async def _go_on(self) -> None:
        while True:
            try:
                value = await asyncio.to_thread(self._one, self._tenant, self._handoff_id)
                shown: RenderableType = Group(*handoff_lines(value, self.size.width - 6))
            except RestowError as error:
                shown = Text(f"{error.reason}: {error.message}", style="bold red")
            if not self.is_attached:  # it may have been left meanwhile
                return
            self._text.update(shown)
            await asyncio.sleep(1)
