"""`event_line` says an event in one line, of which nothing is ever cut."""

from __future__ import annotations

from typing import Any

from restow.broker.cli.views.handoff_columns import readers_text
from restow.broker.draw.bytes_and_seconds import duration_text, size_text


def event_line(event: dict[str, Any], tenants: bool = False) -> str:
    """Return the line, without its end; ``tenants``: names of engines and handoffs have theirs."""
    if event["event"] == "broker":
        silent = f"does not answer: {event['detail']}"
        words = silent if event["what"] == "silent" else "answers again"
        return f"{event['at']}  BROKER     {event['broker']}  {words}"
    of = f"{event['tenant']}/" if tenants else ""
    if event["event"] == "engine":
        session = "session open" if event["session"] else "no session"
        what = event["what"] + (f" to {event['broker']}" if event["what"] == "moved" else "")
        words = (
            f"engine {what}, {event['agents']} of {event['ranks']} agents, {session}, "
            f"life {event['incarnation']}"
        )
        return f"{event['at']}  ENGINE     {of}{event['engine_id']}  {words}"
    to = event["destination_engine"] or readers_text(event) or "-"
    words = f"from {event['source_engine'] or '-'} to {to}"
    if event["bytes"]:
        words += f", {size_text(event['bytes'])} read"
    if event["transfer_s"] is not None:
        words += f" in {duration_text(event['transfer_s'])}"
    if event["reason"]:
        words += f", {event['reason']}: {event['detail']}"
    return f"{event['at']}  {event['state']:9}  {of}{event['handoff_id']}  {words}"
