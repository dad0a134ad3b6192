"""Errors as clients of an OpenAI API read them, and what an engine's failure is."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

from aiohttp import web

from restow.broker.errors import RestowError
from restow.broker.router.engines import Engine

STREAM_MARK = b'data: {"error"'
"""How an error begins in a stream of events."""


class EngineFailedError(RestowError, status="UNAVAILABLE", reason="ENGINE_FAILED"):
    """An engine that did not answer, or answered that it can't: another one may."""

    def __init__(
        self,
        engine: Engine,
        message: str,
        body: bytes = b"",
        code: int = HTTPStatus.BAD_GATEWAY,
    ) -> None:
        """``body`` and ``code`` are what the engine said, if it said anything."""
        super().__init__(f"{engine.base}: {message}", engine=engine.base)
        self.engine, self.code = engine, HTTPStatus(code)
        self.said = _error_of(body)

    @property
    def handoff(self) -> dict[str, Any] | None:
        """What became of the handoff, if the engine says that it failed by that."""
        told = self.said.get("handoff") if self.said else None
        return told if isinstance(told, dict) else None

    def answer(self) -> web.Response:
        """For the client: the engine's own words, where it had any."""
        if self.said is None:
            return error_answer(HTTPStatus.BAD_GATEWAY, self.message, "engine_failed")
        return web.json_response({"error": self.said}, status=self.code)


class RefusedError(RestowError, status="INVALID_ARGUMENT", reason="REQUEST_REFUSED"):
    """A request that an engine refused for a fault of its own: no other engine would take it."""

    def __init__(self, answer: web.Response) -> None:
        """Carry the engine's answer."""
        super().__init__("the engine refused the request")
        self.answer = answer


def error_answer(status: HTTPStatus, message: str, kind: str) -> web.Response:
    """An error of the router's own."""
    return web.json_response(error_body(status, message, kind), status=status)


def error_body(status: HTTPStatus, message: str, kind: str) -> dict[str, Any]:
    """As OpenAI's API has errors."""
    return {"error": {"message": message, "type": kind, "param": None, "code": status.value}}


def broken_stream(message: str) -> bytes:
    """The event that ends a stream which an engine has left in its midst."""
    said = error_body(HTTPStatus.BAD_GATEWAY, message, "engine_failed")
    return b"\n\ndata: " + json.dumps(said).encode() + b"\n\n"


def _error_of(body: bytes) -> dict[str, Any] | None:
    """What stands under "error" in an answer or in a stream's event."""
    try:
        said = json.loads(body.removeprefix(b"data: ").partition(b"\n\n")[0])
    except ValueError:
        return None
    error = said.get("error") if isinstance(said, dict) else None
    return error if isinstance(error, dict) else None
