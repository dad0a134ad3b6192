"""`News` is what has happened in a broker, or several, since it was last looked at."""

from __future__ import annotations

import time
from collections.abc import Iterator, Set
from datetime import UTC, datetime
from typing import Any

from restow.broker.client.admin import AdminClient
from restow.broker.display.documents import engines_json, handoffs_json
from restow.broker.errors import RestowError

Event = dict[str, Any]
End = tuple[str, str, str, int]
"""A broker, and a handoff that ended there: its tenant, id and number."""

MAX_LISTED = 10_000
MARGIN_S = 5.0
"""Looks overlap by so much: an answer may be under way for a while."""
OF_ENDS = (
    *("tenant", "handoff_id", "state", "source_engine", "destination_engine"),
    *("bytes", "transfer_s", "reason", "detail", "readers", "delivered", "broker"),
)


class News:
    """Asks brokers for ends of handoffs, and compares their engines with those they had before.

    Of several one may be silent for a while: what it had stays as it was, and what ended there
    meanwhile is told when it answers again.
    """

    def __init__(self, client: AdminClient, since_s: float) -> None:
        """Begin with what ended in the last ``since_s`` seconds."""
        self._client = client
        begin_s = time.monotonic() - since_s + MARGIN_S
        self._looked_s = dict.fromkeys(client.addresses, begin_s)
        """When each broker answered last."""
        self._silent: set[str] = set()
        self._told: set[End] = set()
        self._engines: dict[tuple[str, str], dict[str, Any]] | None = None
        self.left_out = 0
        """Ends that there were too many of, at the last look."""

    def look(self) -> list[Event]:
        """Return what is new, the oldest first. Raises as the client."""
        silent_before = self._silent
        found, looked_s = self._ended(self._looked_s.keys() - silent_before)
        if silent_before - self._client.unanswered.keys():  # who answers again has more to tell
            found, looked_s = self._ended(self._looked_s.keys())
        wall_s = time.time() - (time.monotonic() - looked_s)
        within_s = {at: looked_s - before_s + MARGIN_S for at, before_s in self._looked_s.items()}
        silent = dict(self._client.unanswered)
        ends = found["handoffs"][::-1]
        fresh = [
            {
                "at": _moment(wall_s - one["ended_ago_s"]),
                "event": "handoff",
                **{name: one[name] for name in OF_ENDS},
            }
            for one in ends
            if one["ended_ago_s"] <= within_s[self._at(one)] and self._key(one) not in self._told
        ]
        fresh += _heard(silent_before, silent, _moment(wall_s))
        after = self._engines_now()
        if self._engines is not None:
            fresh += _changes(self._engines, after, _moment(wall_s))
        kept = {key for key in self._told if key[0] in silent}
        self._told, self._engines = kept.union(map(self._key, ends)), after
        self._looked_s.update(dict.fromkeys(self._looked_s.keys() - silent.keys(), looked_s))
        self._silent, self.left_out = set(silent), found["left_out"]
        return fresh

    def _ended(self, brokers: Set[str]) -> tuple[dict[str, Any], float]:
        """Return what ended since these brokers answered last, and when they were asked."""
        asked_s = time.monotonic()
        within_s = asked_s - min(self._looked_s[at] for at in brokers) + MARGIN_S
        within_s = max(within_s, MARGIN_S)  # of 0 all would be listed
        told = self._client.handoffs(limit=MAX_LISTED, ended_within_s=within_s)
        return handoffs_json(told), asked_s

    def _engines_now(self) -> dict[tuple[str, str], dict[str, Any]]:
        """Each once: at the broker where it has a session, if it is known to two of them."""
        told = engines_json(self._client.engines())["engines"]
        silent = self._client.unanswered
        known = [one for one in (self._engines or {}).values() if one["broker"] in silent]
        rows = [*known, *sorted(told, key=lambda one: bool(one["session"]))]
        return {(one["tenant"], one["engine_id"]): one for one in rows}

    def _at(self, one: dict[str, Any]) -> str:
        return one["broker"] or self._client.address

    def _key(self, one: dict[str, Any]) -> End:
        return self._at(one), one["tenant"], one["handoff_id"], one["number"]


def _heard(before: set[str], silent: dict[str, RestowError], at: str) -> Iterator[Event]:
    for broker in sorted(before ^ silent.keys()):
        what = "silent" if broker in silent else "answers"
        detail = silent[broker].message if broker in silent else ""
        yield {"at": at, "event": "broker", "what": what, "broker": broker, "detail": detail}


def _changes(before: dict[Any, Any], after: dict[Any, Any], at: str) -> Iterator[Event]:
    for key in sorted(before.keys() | after.keys()):
        was, now = before.get(key), after.get(key)
        what = _what_happened(was, now)
        one = now or was
        if what and one:
            shown = ("tenant", "engine_id", "incarnation", "agents", "ranks", "session", "broker")
            yield {"at": at, "event": "engine", "what": what, **{name: one[name] for name in shown}}


def _what_happened(was: dict[str, Any] | None, now: dict[str, Any] | None) -> str:
    if now is None:
        return "gone"
    if was is None:
        return "registered"
    if was["incarnation"] != now["incarnation"]:
        return "replaced"
    if was["broker"] != now["broker"]:
        return "moved"
    same = all(was[name] == now[name] for name in ("agents", "session"))
    return "" if same else "changed"


def _moment(wall_s: float) -> str:
    return datetime.fromtimestamp(wall_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
