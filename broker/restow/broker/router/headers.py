"""Which headers go through a router."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Final

REQUEST_ID: Final = "X-Request-Id"
OWN_LINE: Final = frozenset(
    {
        *("connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding"),
        *("upgrade", "host", "expect", "content-length", "content-encoding", "content-type"),
        *("accept-encoding",),
    }
)
"""Those that speak of one connection, or of how a body lies on it."""
OF_THE_SERVER: Final = frozenset({"server", "date"})


def to_engine(headers: Mapping[str, str]) -> dict[str, str]:
    """The client's own: keys, traces, whatever it is. A request without an id gets one."""
    dropped = OWN_LINE | {REQUEST_ID.lower()}
    kept = {key: value for key, value in headers.items() if key.lower() not in dropped}
    return {REQUEST_ID: headers.get(REQUEST_ID) or uuid.uuid4().hex, **kept}


def to_client(headers: Mapping[str, str], request_id: str) -> dict[str, str]:
    """The engine's own, and the request's id."""
    dropped = (OWN_LINE | OF_THE_SERVER | {REQUEST_ID.lower()}) - {"content-type"}
    kept = {key: value for key, value in headers.items() if key.lower() not in dropped}
    return {**kept, REQUEST_ID: request_id}
