"""One question to one engine: its answer, or an error that says whether to ask another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import ClientError, ClientResponse, ClientSession, web

from restow.broker.router.answers import STREAM_MARK, EngineFailedError, RefusedError
from restow.broker.router.engines import Engine


@dataclass(slots=True)
class Begun:
    """An answer that has begun well. Of one that is no stream, ``first`` is all."""

    engine: Engine
    response: ClientResponse
    first: bytes = b""

    @property
    def streams(self) -> bool:
        """Whether it is a stream of events."""
        return str(self.response.content_type) == "text/event-stream"

    async def more(self) -> bytes:
        """What comes next of a stream; empty at its end. Raises `EngineFailedError`."""
        try:
            found: bytes = await self.response.content.readany()
        except (ClientError, TimeoutError) as error:
            raise EngineFailedError(self.engine, _words(error)) from None
        return found

    def close(self) -> None:
        """Let the connection go."""
        self.response.close()


async def ask(
    http: ClientSession,
    engine: Engine,
    path: str,
    headers: Mapping[str, str],
    body: dict[str, Any] | None,
) -> Begun:
    """Wait until an engine has begun to answer; GET if there is no body.

    Raises `RefusedError` where asking elsewhere is of no use, else `EngineFailedError`.
    """
    method = "GET" if body is None else "POST"
    try:
        response = await http.request(method, engine.base + path, json=body, headers=headers)
    except (ClientError, TimeoutError) as error:
        raise EngineFailedError(engine, _words(error)) from None
    one = Begun(engine, response)
    try:
        one.first = await _first(one)
    except BaseException:
        one.close()
        raise
    return one


async def _first(one: Begun) -> bytes:
    response = one.response
    if response.status < 400 and one.streams:
        first = await one.more()
        if not first or first.startswith(STREAM_MARK):
            raise EngineFailedError(one.engine, "it ended before it had said anything", first)
        return first
    try:
        whole: bytes = await response.read()
    except (ClientError, TimeoutError) as error:
        raise EngineFailedError(one.engine, _words(error)) from None
    if response.status >= 500:
        raise EngineFailedError(one.engine, f"HTTP {response.status}", whole, response.status)
    if response.status >= 400:
        kind = str(response.content_type)
        raise RefusedError(web.Response(status=response.status, body=whole, content_type=kind))
    return whole


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
