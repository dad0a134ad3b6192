"""The router's server: it asks P for a prompt's state and D for the answer, both at once."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import random
import re
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
from aiohttp import web

from restow.broker.client import AsyncAdminClient, PrefixHolder, chain_of
from restow.broker.errors import RestowError
from restow.broker.logs import get_logger
from restow.broker.router import bodies
from restow.broker.router.bodies import DONE, Body, MovedReply, Progress

ATTEMPTS: Final = 3
"""How often a request is tried. In the last attempt D computes the prompt itself."""
BUSY_TOKENS: Final = 1000
"""One more request in flight at an engine outweighs this many tokens that it holds."""
REST_S: Final = 5.0
"""How long a P that failed is not asked; a D that failed is asked only if no other can be."""
CONNECT_S: Final = 3.0
TOO_MANY: Final = 429
"""The status of an engine that is too busy for a request, which another engine may take."""
MAX_BODY_BYTES: Final = 16 << 20
PASSED_ON: Final = ("Authorization", "traceparent", "tracestate", "X-Request-Id")
"""The client's headers that engines are sent. No header of an engine is passed to the client."""
OWN_HOST: Final = re.compile(r"(localhost|[0-9.]+|\[[0-9a-fA-F:.]+\])(:[0-9]+)?")
EVENT_END: Final = re.compile(rb"\r?\n\r?\n")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Held = Mapping[str, PrefixHolder]
"""What engines hold of a prompt, by engine id."""


@dataclass(slots=True, eq=False)
class RoutedEngine:
    """An engine that requests are sent to."""

    url: str
    engine_id: str = ""
    """The engine's id at the broker; empty if it is not known."""
    in_flight: int = 0
    rests_until_s: float = 0.0

    @property
    def rests(self) -> bool:
        """Whether the engine failed a short time ago."""
        return time.monotonic() < self.rests_until_s


class AnswerError(RestowError, status="UNAVAILABLE", reason="NOT_ANSWERED"):
    """A request has no answer. If an ``engine`` is to blame, another engine may answer."""

    def __init__(
        self, code: int, message: str, engine: RoutedEngine | None = None, answer: Any = None
    ) -> None:
        """Tell the client the error in the engine's ``answer``, if it has an error."""
        super().__init__(f"{engine.url}: {message}" if engine else message)
        self.code, self.engine = code, engine
        kind = "engine_failed" if engine else "invalid_request_error"
        own = bodies.error_body(code, self.message, kind)
        self.body = {"error": error} if (error := bodies.error_of(answer)) else own


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """A whole answer, or an event of a stream."""

    data: Any
    event: bytes = b""


Parts = AsyncGenerator[AnswerPart, None]


def choose(engines: Sequence[RoutedEngine], held: Held) -> RoutedEngine:
    """Return the engine that holds most of a prompt, less `BUSY_TOKENS` for each of its requests.

    Engines that rest or drain come last. Among equals, the choice is random.
    """

    def rank(engine: RoutedEngine) -> tuple[bool, int, int, float]:
        holder = held.get(engine.engine_id)
        away = engine.rests or bool(holder and holder.draining)
        # The broker knows of other routers' requests.
        busy = max(engine.in_flight, holder.open if holder else 0)
        worth = (holder.tokens if holder else 0) - busy * BUSY_TOKENS
        return away, -worth, busy, random.random()  # noqa: S311

    return min(engines, key=rank)


class Router:
    """Answer clients by asking engines. A router belongs to one event loop."""

    def __init__(
        self,
        prefill: Sequence[RoutedEngine],
        decode: Sequence[RoutedEngine],
        silence_s: float = 600.0,
        broker: AsyncAdminClient | None = None,
        find_s: float = 0.0,
        may_change: bool = False,
    ) -> None:
        """Give up an engine that sends nothing for ``silence_s``.

        Ask the ``broker`` who holds each prompt, and wait ``find_s`` for its token ids and again
        for the broker. ``may_change``: other engines may come later (`use`).
        """
        self._prefill, self._decode = prefill, decode
        self._may_change = may_change
        self._broker, self._find_s = broker, find_s
        self._log = get_logger("restow.router")
        self._http = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(None, sock_connect=CONNECT_S, sock_read=silence_s),
            # Less than engines keep a connection (vLLM: 5 s), so that none closes under a request.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0),
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    def use(self, *sides: Sequence[tuple[str, str]]) -> None:
        """Ask the P and D of these URLs and ids from now on; requests under way go on."""
        known = {(one.url, one.engine_id): one for one in (*self._prefill, *self._decode)}
        self._prefill, self._decode = (
            [known.get(name) or RoutedEngine(*name) for name in side] for side in sides
        )

    def app(self) -> web.Application:
        """Return the application that aiohttp serves."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[web.middleware(_guard)])
        for path in ("/v1/models", "/health"):
            app.router.add_get(path, self.answer)
        for path in bodies.ONE_TOKEN:
            app.router.add_post(path, self.answer)
        app.on_cleanup.append(lambda _: self._http.close())
        return app

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer a client. Raises `AnswerError`.

        When engines fail before the client is sent anything, the router tries others.
        """
        body = await _body_of(request) if request.method == "POST" else None
        held = await self._holders(request, body) if body and self._broker else {}
        hands_over = body is not None and not bodies.needs_whole_prompt(body)
        attempts_left = ATTEMPTS
        while True:
            attempts_left -= 1
            p: RoutedEngine | None = choose(self._prefill, held)
            if not hands_over or not attempts_left or (p and p.rests):
                p = None
            try:
                return await self._attempt(request, body, p, choose(self._decode, held))
            except AnswerError as error:
                if error.engine is None or not attempts_left:
                    raise
                # If no state came, D is not to blame.
                failed = p if p and bodies.handoff_failed(error.body) else error.engine
                failed.rests_until_s = time.monotonic() + REST_S
                answer = bodies.error_of(error.body)
                self._log.warning(
                    "an engine failed", engine=failed.url, detail=error.message, answer=answer
                )

    async def _attempt(
        self, request: web.Request, body: Body | None, p: RoutedEngine | None, d: RoutedEngine
    ) -> web.StreamResponse:
        """Ask P and D at once, under an id that no other attempt has; without ``p`` ask D alone.

        P may compute until D's answer has ended. Raises `AnswerError` until D has sent a token.
        """
        handoff_id = str(uuid.uuid4())
        reply = None
        may_move = self._may_change or len(self._decode) > 1
        if body is not None and may_move and bodies.is_movable(request.path, body):
            reply = bodies.MovedReply(body)
        to_d = None
        if body is not None:
            to_d = bodies.decode_body(body, handoff_id if p else None, reply is not None)
        answers = [self._parts(request, d, to_d)]
        if p and body is not None:
            to_p = bodies.prefill_body(request.path, body, handoff_id)
            answers.append(self._parts(request, p, to_p))
        first, *prefill = [asyncio.ensure_future(anext(answer)) for answer in answers]
        for engine in filter(None, (d, p)):
            engine.in_flight += 1
        try:
            await asyncio.wait([first, *prefill], return_when=asyncio.FIRST_COMPLETED)
            if not first.done():
                prefill[0].result()
            later = answers[0] if reply is None else self._one_reply(request, reply, d, answers[0])
            async with aclosing(later):
                return await self._give(request, await first, later, reply)
        finally:
            for engine in filter(None, (d, p)):
                engine.in_flight -= 1
            for task in (first, *prefill):
                task.cancel()
            await asyncio.gather(first, *prefill, return_exceptions=True)
            for answer in answers:
                await answer.aclose()

    async def _give(
        self, request: web.Request, first: AnswerPart, later: Parts, reply: MovedReply | None
    ) -> web.StreamResponse:
        """Give the client D's answer. A stream that breaks later ends with an error."""
        if not first.event:
            data = first.data if reply is None else reply.whole(first.data)
            while reply is not None and reply.moved:
                data = reply.whole((await anext(later)).data)
            return web.json_response(data)
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await out.prepare(request)
        part: AnswerPart | None = first
        try:
            while part:
                event = part.event if reply is None else _said(reply, part)
                if event:
                    await out.write(event + b"\n\n")
                part = await anext(later, None)
        except AnswerError as error:
            self._log.warning("a stream broke", detail=error.message)
            await out.write(b"data: " + json.dumps(error.body).encode() + b"\n\n")
        return out

    async def _one_reply(
        self, request: web.Request, reply: MovedReply, d: RoutedEngine, own: Parts
    ) -> Parts:
        """Yield D's parts, and after each move those of the engine that goes on with the reply."""
        parts, away = own, [d]
        while True:
            async with aclosing(parts):
                async for part in parts:
                    yield part
                    if reply.moved:
                        break
            if not reply.moved:
                return
            self._log.info("a reply moves", engine=away[-1].url)
            parts = self._go_on(request, reply, away)

    async def _go_on(
        self, request: web.Request, reply: MovedReply, away: list[RoutedEngine]
    ) -> Parts:
        """Yield the parts of an engine that goes on with a reply. Raises `AnswerError`.

        Engines that were asked for it before come last; the one that is asked now joins ``away``.
        """
        body = reply.rest
        for attempts_left in reversed(range(ATTEMPTS)):
            others = [engine for engine in self._decode if engine not in away]
            d = choose(others or self._decode, {})
            away.append(d)
            d.in_flight += 1
            begun = False
            try:
                async for part in self._parts(request, d, body):
                    if not begun and not reply.goes_on(part.data):
                        raise AnswerError(502, "it begins the reply anew", d)
                    begun = True
                    yield part
                return
            except AnswerError as error:
                if begun or not attempts_left or error.engine is None:
                    raise
                d.rests_until_s = time.monotonic() + REST_S
                self._log.warning("an engine failed", engine=d.url, detail=error.message)
            finally:
                d.in_flight -= 1

    async def _parts(self, request: web.Request, engine: RoutedEngine, body: Body | None) -> Parts:
        """Yield a whole answer, or a stream's events once the first token is among them.

        Raises `AnswerError`.
        """
        waiting, begun, ended = list[AnswerPart](), False, False
        try:
            async with self._ask(request, engine, request.path, body) as response:
                if response.status != 200 or response.content_type != "text/event-stream":
                    yield AnswerPart(_checked(engine, response.status, await response.read()))
                    return
                async for event in _events(response.content):
                    data = bodies.event_data(event)
                    progress = bodies.progress_of(data)
                    if progress is Progress.FAILED:
                        raise AnswerError(502, "its stream broke off", engine, data)
                    ended |= progress is Progress.END
                    begun |= progress is Progress.TOKEN or (ended and data != DONE)
                    waiting.append(AnswerPart(data, event))
                    while begun and waiting:
                        yield waiting.pop(0)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise AnswerError(502, f"{type(error).__name__}: {error}", engine) from None
        if not (begun and ended):
            raise AnswerError(502, "its stream ended too early", engine)

    def _ask(self, request: web.Request, engine: RoutedEngine, path: str, body: Body | None) -> Any:
        """Send an engine the client's request, with the headers that may be passed on."""
        headers = {name: request.headers[name] for name in PASSED_ON if name in request.headers}
        return self._http.request(
            request.method, engine.url + path, json=body, headers=headers, allow_redirects=False
        )

    async def _holders(self, request: web.Request, body: Body) -> Held:
        """Return who holds how much of a prompt; empty if the broker does not answer in time."""
        p, salt = choose(self._prefill, {}), body.get("cache_salt") or ""
        try:
            async with asyncio.timeout(self._find_s):
                token_ids = await self._token_ids(request, p, body)
                # In a thread: hashing a very long prompt takes tens of milliseconds.
                chain = await asyncio.to_thread(chain_of, token_ids, salt=salt)
            if not chain.hashes or not self._broker:
                return {}
            async with asyncio.timeout(self._find_s):
                [holders] = await self._broker.find([chain], engine_id=p.engine_id, limit=100)
        except (RestowError, aiohttp.ClientError, ValueError, TimeoutError) as error:
            self._log.warning("not known who holds the prompt", detail=repr(error)[:500])
            return {}
        return {holder.engine_id: holder for holder in holders}

    async def _token_ids(self, request: web.Request, p: RoutedEngine, body: Body) -> list[Any]:
        """Return a prompt's token ids; P tells the token ids of a text or a chat."""
        is_chat = request.path == "/v1/chat/completions"
        prompt: Any = body.get("messages" if is_chat else "prompt")
        if is_chat or isinstance(prompt, str):
            async with self._ask(request, p, "/tokenize", bodies.decode_body(body, None)) as reply:
                tokenized = bodies.parse_json(await reply.read())
            prompt = tokenized.get("tokens") if isinstance(tokenized, dict) else None
        return prompt if isinstance(prompt, list) else []


async def _body_of(request: web.Request) -> Body:
    """Return a request's body. Raises `AnswerError`."""
    if request.content_type != "application/json":  # a web page of another site may not send it
        raise AnswerError(415, "the body must be application/json")
    try:
        body = json.loads(await request.read())
    except (ValueError, RecursionError) as error:
        raise AnswerError(400, f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise AnswerError(400, "the body is not a JSON object")
    return body


def _said(reply: MovedReply, part: AnswerPart) -> bytes:
    """Return an event of a reply that may move, as its client gets it; empty: it gets none."""
    data = reply.part(part.data)
    if isinstance(data, dict):
        return b"data: " + json.dumps(data).encode()
    return b"" if data is None else part.event


def _checked(engine: RoutedEngine, status: int, raw: bytes) -> Any:
    """Return a whole answer. Raises `AnswerError`, which names no engine for a client's fault."""
    data = bodies.parse_json(raw)
    if 400 <= status < 500 and status != TOO_MANY:
        raise AnswerError(status, raw[:500].decode(errors="replace"), answer=data)
    if status != 200:
        raise AnswerError(status if status >= 400 else 502, f"HTTP {status}", engine, data)
    if bodies.progress_of(data) is Progress.FAILED:
        raise AnswerError(502, "it gave up its answer", engine, data)
    return data


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield a stream's events, without the empty lines between them."""
    rest = b""
    async for chunk in content.iter_any():
        *events, rest = EVENT_END.split(rest + chunk)
        for event in filter(None, events):
            yield event


async def _guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer every error as JSON, and refuse a request that a web page may have forged."""
    try:
        here, *_ = request.get_extra_info("sockname", ["127.0.0.1"])
        if ipaddress.ip_address(here).is_loopback and not OWN_HOST.fullmatch(request.host):
            # The owner of a name may point it here (DNS rebinding).
            raise AnswerError(421, "over loopback, Host must be localhost or an IP address")
        return await handler(request)
    except AnswerError as error:
        code, body = error.code, error.body
    except RecursionError:
        code, body = 400, bodies.error_body(400, "the body is nested too deeply")
    except web.HTTPException as error:
        code, body = error.status, bodies.error_body(error.status, error.text or error.reason)
    return web.json_response(body, status=code)
