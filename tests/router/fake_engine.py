"""The far side of the router: an HTTP server that writes down what it is asked, and may fail."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import ClientSession, web

from restow.broker.router.finding import FindSettings
from restow.broker.router.serve import RouterSettings, running_router

Answer = Callable[["FakeEngine", web.Request], Awaitable[web.StreamResponse]]
EVENTS = [b'data: {"choices": [{"text": "one"}]}\n\n', b'data: {"choices": [{"text": "two"}]}\n\n']
END = b"data: [DONE]\n\n"
FATE = {"message": "no state", "handoff": {"reason": "NOT_PUBLISHED", "detail": "nobody did"}}


@dataclass
class FakeEngine:
    """What it was asked, and how it answers."""

    base: str
    answer: Answer
    healthy: bool = True
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    token_ids: list[Any] | None = None
    """What it says that a prompt's are; None: it has no tokenizer to ask."""
    tokenize: Callable[[web.Request], Awaitable[web.StreamResponse]] | None = None
    """What it does in place of that."""
    tokenized: list[dict[str, Any]] = field(default_factory=list)
    """The prompts that it was asked for theirs."""
    came: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a client went away before its answer."""

    @property
    def ids(self) -> list[str]:
        """The handoffs that it was asked for."""
        return [one["kv_transfer_params"]["handoff_id"] for one in self.bodies]

    async def serve(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/health":
            return web.Response(status=200 if self.healthy else 503)
        if request.path == "/tokenize":
            self.tokenized.append(await request.json())
            if self.tokenize is not None:
                return await self.tokenize(request)
            if self.token_ids is None:
                return web.Response(status=404)
            return web.json_response({"tokens": self.token_ids, "count": len(self.token_ids)})
        self.headers.append({key.lower(): value for key, value in request.headers.items()})
        self.bodies.append(await request.json() if request.can_read_body else {})
        self.came.set()
        try:
            return await self.answer(self, request)
        except asyncio.CancelledError:
            self.left.set()
            raise


async def well(engine: FakeEngine, request: web.Request) -> web.StreamResponse:
    """As an engine does when nothing is wrong."""
    if not (engine.bodies[-1].get("stream")):
        return web.json_response({"base": engine.base, "path": request.path})
    return await events(request, END)


async def events(request: web.Request, last: bytes) -> web.StreamResponse:
    """A stream of two events and ``last``; without one the connection breaks."""
    out = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await out.prepare(request)
    for event in EVENTS:
        await out.write(event)
    if not last:
        assert request.transport is not None
        request.transport.close()
        return out
    await out.write(last)
    await out.write_eof()
    return out


def streams(*said: Any, then: Answer | None = None) -> Answer:
    """A stream of the data of these events, which ends, or goes on as ``then`` does."""

    async def answer(engine: FakeEngine, request: web.Request) -> web.StreamResponse:
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await out.prepare(request)
        for one in said:
            words = one if isinstance(one, str) else json.dumps(one)
            kind = f"event: {one['type']}\n" if "type" in one else ""
            await out.write(f"{kind}data: {words}\n\n".encode())
        if then:
            await then(engine, request)
        return out

    return answer


def says(status: int, error: dict[str, Any] | None = None) -> Answer:
    """Always the same error."""

    async def answer(engine: FakeEngine, request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": error or {"message": f"from {status}"}}, status=status)

    return answer


async def never(engine: FakeEngine, request: web.Request) -> web.StreamResponse:
    """Waits for what does not come, as D does without a P."""
    await asyncio.Event().wait()
    raise AssertionError


async def breaks(engine: FakeEngine, request: web.Request) -> web.StreamResponse:
    """Goes away without a word."""
    assert request.transport is not None
    request.transport.close()
    return web.Response()


@dataclass
class House:
    """A router and its engines."""

    router: str
    http: ClientSession
    p: list[FakeEngine]
    d: list[FakeEngine]

    @classmethod
    @contextlib.asynccontextmanager
    async def of(
        cls, router: str, p: list[FakeEngine], d: list[FakeEngine]
    ) -> AsyncIterator[House]:
        """Asks a router that runs."""
        async with ClientSession() as http:
            yield cls(router, http, p, d)

    async def ask(
        self, body: Any = None, path: str = "/v1/completions", **headers: str
    ) -> tuple[int, dict[str, Any]]:
        """Status and answer."""
        sent = {"prompt": "who?"} if body is None else body
        async with self.http.post(self.router + path, json=sent, headers=headers) as response:
            return response.status, await response.json()

    async def health(self) -> tuple[int, dict[str, dict[str, bool]]]:
        """The router's own."""
        async with self.http.get(self.router + "/health") as response:
            return response.status, await response.json()

    async def sees(self, engine: FakeEngine) -> None:
        """Wait until the router knows how an engine is."""
        while True:
            found = await self.health()
            if any(side.get(engine.base) is engine.healthy for side in found[1].values()):
                return


@contextlib.asynccontextmanager
async def served(app: web.Application) -> AsyncIterator[str]:
    """An application's address, while it runs."""
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0]
    try:
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def fake_engine(answer: Answer) -> AsyncIterator[FakeEngine]:
    engine = FakeEngine("", answer)
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", engine.serve)
    async with served(app) as engine.base:
        yield engine


@contextlib.asynccontextmanager
async def house(
    p: list[Answer],
    d: list[Answer],
    aside_s: float = 60.0,
    look_s: float = 0.05,
    find: FindSettings | None = None,
    others: tuple[str, ...] = (),
    more_p: tuple[str, ...] = (),
    **more: Any,
) -> AsyncIterator[House]:
    """A router before engines that answer so; their ids are p0, p1, ... and d0, d1, ...

    ``others`` are addresses of further D's, ``more_p`` of further P's.
    """
    async with contextlib.AsyncExitStack() as stack:
        sides = [
            [await stack.enter_async_context(fake_engine(one)) for one in side] for side in (p, d)
        ]
        prefill, decode = (
            [f"{name}{number}={one.base}" for number, one in enumerate(side)]
            for name, side in zip("pd", sides, strict=True)
        )
        settings = RouterSettings(
            [*prefill, *more_p], [*decode, *others], aside_s, look_s, find=find, **more
        )
        router = await stack.enter_async_context(running_router(settings, "127.0.0.1", 0))
        http = await stack.enter_async_context(ClientSession())
        yield House(router, http, *sides)
