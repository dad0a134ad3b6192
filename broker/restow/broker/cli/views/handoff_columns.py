"""Tables show a handoff by these columns: a title, and a text made of the ``--json`` form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from restow.broker.draw.bytes_and_seconds import duration_text, size_text

Values = dict[str, Any]


def _lease(one: Values) -> str:
    return "-" if one["lease_s"] is None else duration_text(max(0.0, one["lease_s"]))


COLUMNS: dict[str, Callable[[Values], str]] = {
    "handoff": lambda one: one["handoff_id"],
    "state": lambda one: one["state"],
    "from": lambda one: one["source_engine"] or "-",
    "to": lambda one: one["destination_engine"] or "-",
    "tokens": lambda one: str(one["position_tokens"] or "-"),
    "read": lambda one: size_text(one["bytes"]),
    "age": lambda one: duration_text(one["age_s"]),
    "lease": _lease,
    "waits for": lambda one: one["waits_for"] or "",
    "reason": lambda one: one["reason"] or "",
    "detail": lambda one: one["detail"] or "",
}
HANDOFFS = ("handoff", "state", "from", "to", "tokens", "read", "age", "reason")
"""Of ``restow handoffs``; a wide terminal shows the detail too."""
LEASES = ("handoff", "from", "lease", "state", "waits for")
UNDER_WAY = ("handoff", "state", "from", "to", "tokens", "age", "lease", "waits for")
"""Of ``restow top``; a narrow screen leaves the last one out."""
NUMBERS = ("tokens", "read", "age", "lease")
"""Columns that stand to the right."""


def handoff_row(one: Values, columns: Sequence[str]) -> list[str]:
    """Return the texts of some columns."""
    return [COLUMNS[name](one) for name in columns]
