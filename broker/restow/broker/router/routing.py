"""A client's request on its way: to a P and a D, and to others if they fail."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from http import HTTPStatus

from aiohttp import ClientSession, web

from restow.broker.logs import get_logger
from restow.broker.router import headers
from restow.broker.router.answers import (
    EngineFailedError,
    RefusedError,
    broken_stream,
    error_answer,
)
from restow.broker.router.asking import Begun, ask
from restow.broker.router.bodies import (
    Body,
    alone_body,
    decode_body,
    needs_whole_prompt,
    prefill_body,
)
from restow.broker.router.engines import NOBODY, Engine, Engines, Held
from restow.broker.router.finding import Finding

ATTEMPTS = 3
"""How often a request is tried, with other engines each time where there are any."""
P_REFUSED = "PUBLICATION_REFUSED"
"""What became of a handoff whose P computed the prompt, and may not hand it over: it drains."""


class Routing:
    """Hands requests over to engines. Belongs to one event loop."""

    def __init__(
        self, http: ClientSession, prefill: Engines, decode: Engines, finding: Finding | None
    ) -> None:
        """Ask the engines of both sides through ``http``.

        Of several those that hold the prompt already, as ``finding`` finds them; None: it does not
        matter.
        """
        self._http, self._prefill, self._decode = http, prefill, decode
        self._finding = finding
        self._log = get_logger("restow.router")

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Serve a request that has a prompt."""
        try:
            body = await request.json()
        except (ValueError, LookupError) as error:
            return _no_request(f"the body is no JSON: {error}")
        if not isinstance(body, dict):
            return _no_request("the body is no JSON object")
        return await self._tried(request, body)

    async def passed_on(self, request: web.Request) -> web.StreamResponse:
        """Ask any D what the client asks."""
        return await self._tried(request, None)

    async def _tried(self, request: web.Request, body: Body | None) -> web.StreamResponse:
        """Asked of others as long as an engine fails that has not yet said anything."""
        sent = headers.to_engine(request.headers)
        request_id = sent[headers.REQUEST_ID]
        tried: set[Engine] = set()
        held = NOBODY
        if self._finding is not None and body is not None:
            held = await self._finding.holders(request.path, body, sent)
        for attempt in range(1, ATTEMPTS + 1):
            d = self._decode.choose(tried, held)
            tried.add(d)
            with d.busy():
                try:
                    one = await self._begun(request.path, body, sent, d, tried, held)
                except RefusedError as error:
                    return error.answer
                except EngineFailedError as error:
                    failure = error
                else:
                    try:
                        return await self._given(request, one, request_id)
                    finally:
                        one.close()
            self._log.warning(
                "an engine failed",
                request=request_id,
                attempt=attempt,
                detail=failure.message,
                said=failure.said,
            )
        return failure.answer()

    async def _begun(
        self,
        path: str,
        body: Body | None,
        sent: Mapping[str, str],
        d: Engine,
        tried: set[Engine],
        held: Held,
    ) -> Begun:
        if body is not None and not needs_whole_prompt(body):
            p = self._prefill.choose(tried, held)
            tried.add(p)
            with p.busy():
                return await self._handed_over(path, body, sent, p, d)
        try:
            return await ask(self._http, d, path, sent, body and alone_body(body))
        except EngineFailedError:
            self._decode.put_aside(d)
            raise

    async def _handed_over(
        self, path: str, body: Body, sent: Mapping[str, str], p: Engine, d: Engine
    ) -> Begun:
        """D's answer to a prompt that P computes. Every attempt is a handoff of its own.

        Raises `RefusedError` and `EngineFailedError`; then the one to blame is put aside.
        """
        handoff_id = str(uuid.uuid4())
        prefill = asyncio.create_task(
            self._prefilled(p, path, sent, prefill_body(path, body, handoff_id))
        )
        decode = asyncio.create_task(ask(self._http, d, path, sent, decode_body(body, handoff_id)))
        try:
            await asyncio.wait({prefill, decode}, return_when=asyncio.FIRST_COMPLETED)
            if not decode.done():
                prefill.result()
            return await decode
        except BaseException as error:
            if isinstance(error, EngineFailedError):
                self._blame(error, p, d, prefill.done())
            decode.cancel()
            (one,) = await asyncio.gather(decode, return_exceptions=True)
            if isinstance(one, Begun):
                one.close()
            raise
        finally:
            prefill.cancel()
            await asyncio.gather(prefill, return_exceptions=True)

    async def _prefilled(self, p: Engine, path: str, sent: Mapping[str, str], body: Body) -> None:
        (await ask(self._http, p, path, sent, body)).close()

    def _blame(self, error: EngineFailedError, p: Engine, d: Engine, prefilled: bool) -> None:
        """Put the engine at fault aside: not a D that got no state, but the P that gave none."""
        if error.engine is p:
            self._prefill.put_aside(p)
        elif error.handoff is None:
            self._decode.put_aside(d)
        elif not prefilled or error.handoff.get("reason") == P_REFUSED:
            self._prefill.put_aside(p)

    async def _given(self, request: web.Request, one: Begun, request_id: str) -> web.StreamResponse:
        """The client has the answer: from the first byte on no other engine can give it."""
        status, kept = one.response.status, headers.to_client(one.response.headers, request_id)
        if not one.streams:
            return web.Response(status=status, headers=kept, body=one.first)
        out = web.StreamResponse(status=status, headers=kept)
        await out.prepare(request)
        try:
            chunk = one.first
            while chunk:
                await out.write(chunk)
                chunk = await one.more()
        except EngineFailedError as error:
            self._decode.put_aside(one.engine)
            self._log.warning("a stream broke", request=request_id, detail=error.message)
            await out.write(broken_stream(f"the stream broke: {error.message}"))
        await out.write_eof()
        return out


def _no_request(message: str) -> web.Response:
    return error_answer(HTTPStatus.BAD_REQUEST, message, "invalid_request_error")
