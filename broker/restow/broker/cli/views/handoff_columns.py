"""Tables show a handoff by these columns: a title, and a text made of the ``--json`` form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.text import Text

from restow.broker.cli.views.listing import Cell, colored
from restow.broker.draw.bytes_and_seconds import duration_text, size_text

Values = dict[str, Any]


def _lease(one: Values) -> str:
    return "-" if one["lease_s"] is None else duration_text(max(0.0, one["lease_s"]))


def progress_text(one: Values) -> str:
    """Return how much of a granted handoff is read, by the ranks that have ended their part."""
    if not one["reading_ranks"]:
        return "-"
    words = f"{size_text(one['bytes'])} of {size_text(one['expected_bytes'])}"
    if one["reading_ranks"] == 1:
        return words
    return f"{words}, {one['settled_ranks']} of {one['reading_ranks']} ranks"


def readers_text(one: Values) -> str:
    """Return how many readers of a publication have the state; empty: it is none."""
    return f"{one['delivered']} of {one['readers']} readers" if one["readers"] else ""


def offers_text(one: Values) -> str:
    """Return what a demand by prefix asked for, and what became of its offers."""
    declined = f", {one['offers_declined']} declined" if one["offers_declined"] else ""
    offered = f"offered to {one['offers']}{declined}" if one["offers"] else "nobody holds it"
    return f"asked for by prefix: {one['prefix_tokens']} tokens, {offered}"


COLUMNS: dict[str, Callable[[Values], str]] = {
    "tenant": lambda one: one["tenant"],
    "broker": lambda one: one["broker"] or "-",
    "handoff": lambda one: one["handoff_id"],
    "state": lambda one: one["state"],
    "from": lambda one: one["source_engine"] or "-",
    "to": lambda one: one["destination_engine"] or readers_text(one) or "-",
    "tokens": lambda one: str(one["position_tokens"] or "-"),
    "read": lambda one: size_text(one["bytes"]),
    "progress": progress_text,
    "age": lambda one: duration_text(one["age_s"]),
    "lease": _lease,
    "by": lambda one: ", ".join(one["strategies"]) or "-",
    "waits for": lambda one: one["waits_for"] or "",
    "reason": lambda one: one["reason"] or "-",
    "detail": lambda one: one["detail"] or one["waits_for"] or "",
}
HANDOFFS = ("handoff", "state", "reason", "from", "to", "age", "read", "tokens")
"""Of ``restow handoffs``; a terminal that has room shows the detail too."""
WIDE_HANDOFFS = (*HANDOFFS, "lease", "by", "detail")
LEASES = ("handoff", "lease", "state", "from", "waits for")
UNDER_WAY = ("handoff", "state", "age", "lease", "from", "to", "tokens", "progress", "waits for")
"""Of ``restow top``; a narrow screen leaves the last two out."""


def handoff_row(one: Values, columns: Sequence[str]) -> list[str]:
    """Return the texts of some columns."""
    return [COLUMNS[name](one) for name in columns]


def handoff_cells(one: Values, columns: Sequence[str]) -> list[Cell]:
    """Return the same, states in their colors."""
    texts = zip(columns, handoff_row(one, columns), strict=True)
    return [colored(text) if name == "state" else Text(text) for name, text in texts]
