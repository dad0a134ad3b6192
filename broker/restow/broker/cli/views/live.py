"""`live_handoffs` shows ``restow handoffs --watch``: in one place, or as one after another."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from rich.live import Live

from restow.broker.cli.views.admin_tables import handoffs_table
from restow.broker.cli.views.listing import console, put


@contextlib.contextmanager
def live_handoffs(wide: bool, tenants: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yield a function that shows the next figures."""
    to = console(wide)
    if not to.is_terminal:
        yield lambda new: put(to, handoffs_table(new, to, wide, tenants), "")
        return
    with Live(console=to, auto_refresh=False) as live:
        yield lambda new: live.update(handoffs_table(new, to, wide, tenants), refresh=True)
