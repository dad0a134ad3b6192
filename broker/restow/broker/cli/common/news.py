"""`News` is what has happened in a broker since it was last looked at."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from restow.broker.client.admin import AdminClient
from restow.broker.display.documents import engines_json, handoffs_json

Event = dict[str, Any]
End = tuple[str, str, int]
"""A handoff that ended: its tenant, id and number."""

MAX_LISTED = 10_000
MARGIN_S = 5.0
"""Looks overlap by this time, because an answer may be under way for a while."""
OF_ENDS = (
    *("tenant", "handoff_id", "state", "source_engine", "destination_engine"),
    *("bytes", "transfer_s", "reason", "detail", "readers", "delivered"),
)


class News:
    """Ask a broker for ends of handoffs, and compare its engines with the engines before.

    A broker that has begun to lead knows of no earlier ends, and engines register with it one
    after the other.
    """

    def __init__(self, client: AdminClient, since_s: float) -> None:
        """Begin with what ended in the last ``since_s`` seconds."""
        self._client = client
        self._looked_s = time.monotonic() - since_s + MARGIN_S
        """When the broker answered last."""
        self._told: set[End] = set()
        self._engines: dict[tuple[str, str], dict[str, Any]] | None = None
        self.left_out = 0
        """Number of ends that the last look left out, because there were too many."""

    def look(self) -> list[Event]:
        """Return what is new, the oldest first. Raises what the client raises."""
        looked_s = time.monotonic()
        within_s = looked_s - self._looked_s + MARGIN_S
        asked_s = max(within_s, MARGIN_S)  # for 0 the broker would list all
        told = self._client.handoffs(limit=MAX_LISTED, ended_within_s=asked_s)
        wall_s = time.time() - (time.monotonic() - looked_s)
        document = handoffs_json(told)
        ends = document["handoffs"][::-1]
        fresh = [
            {
                "at": _moment(wall_s - ended["ended_ago_s"]),
                "event": "handoff",
                **{name: ended[name] for name in OF_ENDS},
            }
            for ended in ends
            if ended["ended_ago_s"] <= within_s and _key(ended) not in self._told
        ]
        after = {
            (engine["tenant"], engine["engine_id"]): engine
            for engine in engines_json(self._client.engines())["engines"]
        }
        if self._engines is not None:
            fresh += _changes(self._engines, after, _moment(wall_s))
        self._told, self._engines = set(map(_key, ends)), after
        self._looked_s, self.left_out = looked_s, document["left_out"]
        return fresh


def _key(handoff: dict[str, Any]) -> End:
    return handoff["tenant"], handoff["handoff_id"], handoff["number"]


def _changes(before: dict[Any, Any], after: dict[Any, Any], at: str) -> Iterator[Event]:
    for key in sorted(before.keys() | after.keys()):
        was, now = before.get(key), after.get(key)
        what = _what_happened(was, now)
        engine = now or was
        if what and engine:
            shown = ("tenant", "engine_id", "incarnation", "agents", "ranks", "session")
            yield {
                "at": at,
                "event": "engine",
                "what": what,
                **{name: engine[name] for name in shown},
            }


def _what_happened(was: dict[str, Any] | None, now: dict[str, Any] | None) -> str:
    if now is None:
        return "gone"
    if was is None:
        return "registered"
    if was["incarnation"] != now["incarnation"]:
        return "replaced"
    same = all(was[name] == now[name] for name in ("agents", "session"))
    return "" if same else "changed"


def _moment(wall_s: float) -> str:
    return datetime.fromtimestamp(wall_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
