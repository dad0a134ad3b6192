"""The router's process: a client's request on its way to a P and a D, and the door before it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import resource
import signal
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any, Final

from aiohttp import ClientSession, ClientTimeout, DummyCookieJar, TCPConnector, TraceConfig, web

from restow.broker.logs import Allowance, get_logger
from restow.broker.router import bodies
from restow.broker.router.bodies import Body
from restow.broker.router.engines import Answer, AnswerError, Engine, Engines, ask
from restow.broker.router.finding import Finding, FindSettings

ATTEMPTS: Final = 3
"""How often engines are asked for a request that fails when they have it."""
P_REFUSED: Final = "PUBLICATION_REFUSED"
"""What became of a handoff whose P computed the prompt, and may not hand it over: it drains."""
USAGE_S: Final = 5.0
"""How long the end of D's answer waits for what P says of its cache."""
SPARE_FILES: Final = 100
REQUEST_ID: Final = "X-Request-Id"
METHODS: Final[Mapping[str, str]] = MappingProxyType(
    {**dict.fromkeys(bodies.ONE_TOKEN, "POST"), "/v1/models": "GET", "/health": "GET"}
)
OF_LINE: Final = frozenset(
    {
        *("connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding"),
        *("upgrade", "host", "expect", "server", "date", "content-length", "content-type"),
        *("content-encoding", "accept-encoding", "x-request-id"),
    }
)
"""Headers of one connection, of a body's form on it, or of a server: they do not go on."""


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """How the router works."""

    prefill: Sequence[str]
    """Addresses, each as ``URL`` or ``ID=URL`` with the engine's id at the broker."""
    decode: Sequence[str]
    aside_s: float = 5.0
    """How long an engine that failed is left alone."""
    look_s: float = 2.0
    """How often engines are asked how they are."""
    health_s: float = 5.0
    """How long they may take to say it; what is silent twice is lost."""
    connect_s: float = 3.0
    answer_s: float = 600.0
    """How long engines may take to a stream's first token, or to the end of another answer."""
    silence_s: float = 30.0
    """How long a stream may be silent after that."""
    client_s: float = 30.0
    """How long clients may be idle, and take for headers, for a body and to read a piece."""
    max_connections: int = 1000
    max_body_bytes: int = 4 << 20
    max_bodies_bytes: int = 128 << 20
    """Of all requests under way."""
    find: FindSettings | None = None
    """How the broker is asked who holds a prompt; None: it is not."""
    busy_tokens: int = 1000
    """How many tokens held outweigh one request more under way."""


@dataclass(slots=True)
class _Asked:
    """A client's request under way. Its body is parsed anew when tried again, for it is large."""

    request: web.BaseRequest
    headers: Mapping[str, str]
    """For engines."""
    raw: bytearray
    failed: dict[Engine, bool] = field(default_factory=dict)
    """Engines that were tried; True: not to be asked again."""
    parsed: Body | None = None

    def body(self) -> Body | None:
        """Return the body; None of a GET. Raises `AnswerError`."""
        if METHODS[self.request.path] == "GET":
            return None
        body, self.parsed = self.parsed, None
        try:
            body = json.loads(self.raw) if body is None else body
        except (ValueError, RecursionError) as error:
            raise AnswerError(400, f"the body is no JSON: {error}") from None
        if not isinstance(body, dict):
            raise AnswerError(400, "the body is no JSON object")
        return body


class Router:
    """Answers clients by asking engines. Belongs to one event loop."""

    def __init__(self, http: ClientSession, settings: RouterSettings) -> None:
        """Ask engines through ``http``."""
        self._http, self._settings = http, settings
        self.prefill = Engines(settings.prefill, settings.busy_tokens)
        self.decode = Engines(settings.decode, settings.busy_tokens)
        ids = {one.engine_id for one in (*self.prefill.engines, *self.decode.engines)}
        self.finding = settings.find and Finding(http, settings.find, ids)
        self._bodies_bytes = 0
        self._log = get_logger("restow.router")

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a client."""
        request_id = request.headers.get(REQUEST_ID) or uuid.uuid4().hex
        raw = bytearray()
        try:
            wanted = METHODS.get(request.path)
            if request.method.replace("HEAD", "GET") != wanted:
                words = f"{request.method} {request.path} is not served"
                raise AnswerError(405 if wanted else 404, words)
            if request.path == "/health":
                return self._health()
            await self._read(request, raw)
            return await self._tried(_Asked(request, _on(request.headers, request_id), raw))
        except AnswerError as error:
            answer = web.json_response(error.body, status=error.code)
            answer.headers[REQUEST_ID] = request_id
            if not request.content.is_eof():
                answer.force_close()
            return answer
        finally:
            self._bodies_bytes -= len(raw)

    def _health(self) -> web.Response:
        """Return how each engine is; 200 where each side has one that is well."""
        found = {
            name: {one.base: one.healthy for one in side.engines}
            for name, side in (("prefill", self.prefill), ("decode", self.decode))
        }
        well = all(any(side.values()) for side in found.values())
        return web.json_response(found, status=200 if well else 503)

    async def _read(self, request: web.BaseRequest, raw: bytearray) -> None:
        """Read a body, of which all that is read counts. Raises `AnswerError`."""
        most = self._settings.max_body_bytes
        size = request.content_length or 0
        if request.headers.get("Content-Encoding", "identity") != "identity":
            raise AnswerError(415, "a body must come as it is, without Content-Encoding")
        if size <= most and "Expect" in request.headers:
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0
        try:
            async with asyncio.timeout(self._settings.client_s):
                while size <= most and (part := await request.content.readany()):
                    raw += part
                    size = max(size, len(raw))
                    self._bodies_bytes += len(part)
                    if self._bodies_bytes > self._settings.max_bodies_bytes:
                        raise AnswerError(503, "too many requests are under way: try again")
        except TimeoutError:
            raise AnswerError(408, "the body did not come in time") from None
        if size > most:
            raise AnswerError(413, f"the body has more than {most} bytes")

    async def _tried(self, asked: _Asked) -> web.StreamResponse:
        """Ask others as long as an engine fails and the client has heard nothing."""
        body, held, p_engines = asked.body(), dict[str, Any](), self.prefill.engines
        hands_over = body is not None and not bodies.needs_whole_prompt(body)
        if body is not None and self.finding:
            teller, path = self.prefill.choose({}, only_well=True), asked.request.path
            held = dict(await self.finding.holders(teller, path, body, asked.headers))
        asked.parsed = body
        del body
        failure = AnswerError(502, "no engine is left to ask")
        for tries in range(ATTEMPTS):
            p = self.prefill.choose(asked.failed, held, only_well=True) if hands_over else None
            if failure.engine in p_engines and tries == ATTEMPTS - 1:
                p = None
            if failure.engine in p_engines and failure.code == 429 and p is None:
                break  # P's are busy, not gone: their work is not for D's.
            if (d := self.decode.choose(asked.failed, held)) is None:
                break
            with d.busy():
                try:
                    with p.busy() if p else contextlib.nullcontext():
                        answer = await self._begun(asked, d, p)
                except AnswerError as error:
                    if error.engine is None:
                        raise
                    failure = error
                    continue
                if tries:
                    self._say("engines failed", asked, failure, tries)
                return await self._given(asked, answer)
        self._say("engines failed", asked, failure, len(asked.failed))
        raise failure

    async def _begun(self, asked: _Asked, d: Engine, p: Engine | None) -> Answer:
        """Return D's answer to a prompt that P computes, or D itself without a ``p``.

        Every attempt is a handoff of its own. P is asked when D has the request, so that a D that
        is gone costs no prefill. Raises `AnswerError`; then the engine to blame is put aside.
        """
        path, body, handoff_id = asked.request.path, asked.body(), str(uuid.uuid4())
        limits_s = self._settings.answer_s, self._settings.silence_s
        ask_it = partial(ask, self._http, path=path, headers=asked.headers, limits_s=limits_s)
        to_p = to_d = None
        if body is not None:
            to_p = bodies.as_bytes(bodies.prefill_body(path, body, handoff_id))
            to_d = bodies.as_bytes(bodies.decode_body(body, handoff_id if p else None))
        del body
        reached: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        decode: asyncio.Future[Any] = asyncio.create_task(
            ask_it(engine=d, body=to_d, reached=reached)
        )
        tasks: list[asyncio.Future[Any]] = [decode]
        try:
            await asyncio.wait([decode, reached], return_when=asyncio.FIRST_COMPLETED)
            if p and not decode.done():
                tasks.append(asyncio.create_task(ask_it(engine=p, body=to_p)))
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                if not decode.done():
                    tasks[1].result()
            answer: Answer = await decode
        except BaseException as error:
            if isinstance(error, AnswerError):
                self._blame(asked, error, p, prefilled=tasks[-1].done())
            for task in tasks:
                task.cancel()
            for one in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(one, Answer):
                    one.response.close()
            raise
        answer.prefill = tasks[1] if len(tasks) > 1 else None
        return answer

    def _blame(self, asked: _Asked, error: AnswerError, p: Engine | None, prefilled: bool) -> None:
        """Leave the engine at fault alone: of a handoff that failed P, or none if it computed."""
        if (engine := error.engine) is None:
            return
        asked.failed[engine] = False
        if error.fate and p:
            engine = p if not prefilled or error.fate.get("reason") == P_REFUSED else None
        if engine:
            asked.failed[engine] = True
            if error.code != 429:
                engine.aside_until_s = time.monotonic() + self._settings.aside_s

    async def _given(self, asked: _Asked, answer: Answer) -> web.StreamResponse:
        """Give the client the answer: from the first byte on no other engine can."""
        self._bodies_bytes -= len(asked.raw)
        asked.raw.clear()
        response = answer.response
        headers = _on(response.headers, asked.headers[REQUEST_ID])
        headers["Content-Type"] = response.headers.get("Content-Type", "application/json")
        try:
            if answer.events is None:
                if (data := bodies.json_of(answer.whole)) and bodies.cached_details(data):
                    answer.whole = bodies.as_bytes(await self._with_p_s_usage(answer, data))
                return web.Response(body=answer.whole, status=response.status, headers=headers)
            out = web.StreamResponse(status=response.status, headers=headers)
            await out.prepare(asked.request)
            more: tuple[bytes, Any] | None = answer.first
            try:
                while more:
                    event, data = more
                    if bodies.cached_details(data):
                        event = bodies.with_data(event, await self._with_p_s_usage(answer, data))
                    async with asyncio.timeout(self._settings.client_s):
                        await out.write(event + b"\n\n")
                    more = await anext(answer.events, None)
            except AnswerError as error:
                self._blame(asked, error, None, prefilled=True)
                self._say("a stream broke", asked, error, 1)
                await out.write(b"data: " + bodies.as_bytes(error.body) + b"\n\n")
            return out
        finally:
            response.close()
            if answer.prefill:
                answer.prefill.cancel()
                await asyncio.gather(answer.prefill, return_exceptions=True)

    async def _with_p_s_usage(self, answer: Answer, data: Any) -> Any:
        """Return D's data with what P says of its cache; D alone says it itself."""
        if answer.prefill is None:
            return data
        await asyncio.wait({answer.prefill}, timeout=USAGE_S)
        told = answer.prefill.done() and not answer.prefill.exception()
        of_p = bodies.json_of(answer.prefill.result().whole) if told else None
        return bodies.with_cached(data, bodies.cached_details(of_p))

    def _say(self, event: str, asked: _Asked, error: AnswerError, tries: int) -> None:
        request_id = asked.headers[REQUEST_ID][:100]
        self._log.warning(event, request=request_id, tries=tries, detail=error.message)


def _on(headers: Mapping[str, str], request_id: str) -> dict[str, str]:
    """Return the headers that go through the router, keys and traces among them."""
    kept = {name: value for name, value in headers.items() if name.lower() not in OF_LINE}
    return {**kept, REQUEST_ID: request_id}


class Door(web.Server):  # type: ignore[misc]
    """The server's connections. For one too many the one that has been idle longest must go."""

    def __init__(self, router: Router, settings: RouterSettings) -> None:
        """Have a router answer."""
        super().__init__(
            self._serve,
            # A client that leaves takes its requests to the engines with it.
            handler_cancellation=True,
            keepalive_timeout=settings.client_s,
            access_log=None,
            auto_decompress=False,
        )
        self._router, self._settings = router, settings
        self._idle: dict[web.RequestHandler, asyncio.Transport] = {}
        self._busy: set[web.RequestHandler] = set()

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        """Let a client in."""
        super().connection_made(handler, transport)
        self._idle[handler] = transport
        if len(self._idle) + len(self._busy) > self._settings.max_connections:
            self._idle.pop(next(iter(self._idle))).abort()

    def connection_lost(
        self, handler: web.RequestHandler, exc: BaseException | None = None
    ) -> None:
        """Forget a client."""
        super().connection_lost(handler, exc)
        self._idle.pop(handler, None)
        self._busy.discard(handler)

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        handler = request.protocol
        transport = self._idle.pop(handler, None)
        self._busy.add(handler)
        try:
            answer = await self._router.answer(request)
            async with asyncio.timeout(self._settings.client_s):
                await answer.prepare(request)
                await answer.write_eof()
        except TimeoutError:
            raise ConnectionResetError("the client reads too slowly") from None
        finally:
            if handler in self._busy and transport:
                self._busy.discard(handler)
                self._idle[handler] = transport
        return answer


@contextlib.asynccontextmanager
async def running_router(settings: RouterSettings, host: str, port: int) -> AsyncIterator[str]:
    """Serve at an address, which is yielded."""
    trace = TraceConfig()
    trace.on_request_headers_sent.append(_reached)
    async with ClientSession(
        timeout=ClientTimeout(total=None, sock_connect=settings.connect_s),
        # Less than engines keep a connection (vLLM 5 s): if they close it first, a request fails.
        connector=TCPConnector(limit=0, keepalive_timeout=2.0),
        cookie_jar=DummyCookieJar(),
        trace_configs=[trace],
    ) as http:
        router = Router(http, settings)
        runner = web.ServerRunner(Door(router, settings))
        await runner.setup()
        await web.TCPSite(runner, host, port).start()
        watches = [
            asyncio.create_task(
                side.watch(http, one, settings.look_s, settings.health_s, side is router.decode)
            )
            for side in (router.prefill, router.decode)
            for one in side.engines
        ]
        try:
            name, number = runner.addresses[0][:2]
            yield f"http://[{name}]:{number}" if ":" in name else f"http://{name}:{number}"
        finally:
            for watch in watches:
                watch.cancel()
            await asyncio.gather(runner.cleanup(), *watches, return_exceptions=True)
            if router.finding:
                await router.finding.close()


async def _reached(_session: ClientSession, context: SimpleNamespace, _params: object) -> None:
    if (reached := context.trace_request_ctx) and not reached.done():
        reached.set_result(None)


async def serve_router(settings: RouterSettings, host: str, port: int) -> None:
    """Serve until SIGTERM or SIGINT."""
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    most = min(settings.max_connections, (files - SPARE_FILES) // 3)  # a client's and two engines'
    allowance = Allowance(at_once=20, each_s=1.0)
    for name in ("restow.router", "aiohttp.server", "asyncio"):
        logging.getLogger(name).addFilter(lambda _: allowance.take(time.monotonic()) is not None)
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    async with running_router(replace(settings, max_connections=most), host, port) as address:
        print(f"serving at {address}", flush=True)
        await ended.wait()
