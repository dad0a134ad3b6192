"""`News` is what has happened in a broker since it was last looked at."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from restow.broker.cli.views.admin_json import engines_json, handoffs_json
from restow.broker.client.admin import AdminClient

Event = dict[str, Any]

MAX_LISTED = 10_000
MARGIN_S = 5.0
"""Looks overlap by so much: an answer may be under way for a while."""
OF_ENDS = (
    *("tenant", "handoff_id", "state", "source_engine", "destination_engine"),
    *("bytes", "transfer_s", "reason", "detail", "readers", "delivered"),
)


class News:
    """Asks a broker for ends of handoffs, and compares its engines with those it had before."""

    def __init__(self, client: AdminClient, since_s: float) -> None:
        """Begin with what ended in the last ``since_s`` seconds."""
        self._client = client
        self._looked_s, self._since_s = time.monotonic() - since_s, since_s
        self._told: set[tuple[str, str, int]] = set()
        self._engines: dict[tuple[str, str], dict[str, Any]] | None = None
        self.left_out = 0
        """Ends that there were too many of, at the last look."""

    def look(self) -> list[Event]:
        """Return what is new, the oldest first. Raises as the client."""
        now_s, wall_s = time.monotonic(), time.time()
        within_s = now_s - self._looked_s + MARGIN_S
        found = handoffs_json(self._client.handoffs(limit=MAX_LISTED, ended_within_s=within_s))
        ends = found["handoffs"][::-1]
        fresh = [
            {
                "at": _moment(wall_s - one["ended_ago_s"]),
                "event": "handoff",
                **{name: one[name] for name in OF_ENDS},
            }
            for one in ends
            if one["ended_ago_s"] <= self._since_s and _key(one) not in self._told
        ]
        engines = engines_json(self._client.engines())["engines"]
        after = {(one["tenant"], one["engine_id"]): one for one in engines}
        if self._engines is not None:
            fresh += _changes(self._engines, after, _moment(wall_s))
        self._told, self._engines = {_key(one) for one in ends}, after
        self._looked_s, self._since_s, self.left_out = now_s, math.inf, found["left_out"]
        return fresh


def _changes(before: dict[Any, Any], after: dict[Any, Any], at: str) -> Iterator[Event]:
    for key in sorted(before.keys() | after.keys()):
        was, now = before.get(key), after.get(key)
        what = _what_happened(was, now)
        one = now or was
        if what and one:
            shown = ("tenant", "engine_id", "incarnation", "agents", "ranks", "session")
            yield {"at": at, "event": "engine", "what": what, **{name: one[name] for name in shown}}


def _what_happened(was: dict[str, Any] | None, now: dict[str, Any] | None) -> str:
    if now is None:
        return "gone"
    if was is None:
        return "registered"
    if was["incarnation"] != now["incarnation"]:
        return "replaced"
    same = all(was[name] == now[name] for name in ("agents", "session"))
    return "" if same else "changed"


def _key(one: dict[str, Any]) -> tuple[str, str, int]:
    return one["tenant"], one["handoff_id"], one["number"]


def _moment(wall_s: float) -> str:
    return datetime.fromtimestamp(wall_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
