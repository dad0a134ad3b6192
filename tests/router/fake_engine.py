"""Engines that record what they are asked and answer as a test says, and a router before them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import ClientSession, web

from restow.broker.client import AsyncAdminClient
from restow.broker.router.routing import RoutedEngine, Router

Answer = Callable[["FakeEngine", web.Request], Awaitable[web.StreamResponse]]
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
DONE = "[DONE]"
TOKEN: dict[str, Any] = {"choices": [{"text": "stone", "finish_reason": None}]}
END: dict[str, Any] = {"choices": [{"text": "", "finish_reason": "stop"}]}
NO_STATE = {"error": {"message": "no state", "handoff": {"reason": "NOT_PUBLISHED"}}}


@dataclass
class FakeEngine:
    """An engine that records its requests."""

    answer: Answer
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    token_ids: list[Any] | None = None
    """The answer to /tokenize; None: the engine has no tokenizer."""
    tokenized: list[dict[str, Any]] = field(default_factory=list)
    came: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a client went away before its answer."""

    @property
    def ids(self) -> list[str]:
        """Return the handoffs that the engine was asked for."""
        return [body["kv_transfer_params"]["handoff_id"] for body in self.bodies]

    async def serve(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/tokenize":
            self.tokenized.append(await request.json())
            if self.token_ids is None:
                return web.Response(status=404)
            return web.json_response({"tokens": self.token_ids})
        self.headers.append({key.lower(): value for key, value in request.headers.items()})
        self.bodies.append(await request.json() if request.can_read_body else {})
        self.came.set()
        try:
            return await self.answer(self, request)
        except asyncio.CancelledError:
            self.left.set()
            raise


def says(body: Any, status: int = 200) -> Answer:
    """Answer in a single piece."""

    async def answer(engine: FakeEngine, request: web.Request) -> web.StreamResponse:
        return web.json_response(body, status=status)

    return answer


def fails(status: int) -> Answer:
    return says({"error": {"message": f"from {status}"}}, status)


def streams(*events: Any, then: Answer | None = None) -> Answer:
    """Answer with a stream of the data of these events, which ends, or goes on as ``then`` does."""

    async def answer(engine: FakeEngine, request: web.Request) -> web.StreamResponse:
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await out.prepare(request)
        for data in events:
            words = data if isinstance(data, str) else json.dumps(data)
            kind = f"event: {data['type']}\n" if "type" in data else ""
            await out.write(f"{kind}data: {words}\n\n".encode())
        if then:
            await then(engine, request)
        return out

    return answer


async def well(engine: FakeEngine, request: web.Request) -> web.StreamResponse:
    """Answer as an engine does when nothing is wrong."""
    if engine.bodies[-1].get("stream"):
        return await streams(TOKEN, END, DONE)(engine, request)
    return web.json_response({"url": engine.url, "path": request.path})


async def never(engine: FakeEngine, request: web.Request) -> web.StreamResponse:
    """Wait for a state that does not come, as D does without a P."""
    await asyncio.Event().wait()
    raise AssertionError


async def computes(engine: FakeEngine, request: web.Request) -> web.StreamResponse:
    """Wait for a state that does not come, or compute the prompt where there is no handoff."""
    waits = "handoff_id" in engine.bodies[-1].get("kv_transfer_params", {})
    return await (never if waits else well)(engine, request)


async def breaks(engine: FakeEngine, request: web.Request) -> web.StreamResponse:
    """Close the connection without an answer."""
    assert request.transport is not None
    request.transport.close()
    return web.Response()


@dataclass
class House:
    """A router and its engines."""

    url: str
    http: ClientSession
    p: list[FakeEngine]
    d: list[FakeEngine]
    routed_d: list[RoutedEngine]

    async def ask(
        self, body: Any = None, path: str = COMPLETIONS, **headers: str
    ) -> tuple[int, dict[str, Any]]:
        """Ask the router, and return the status and the answer."""
        sent = {"prompt": "who?"} if body is None else body
        async with self.http.post(self.url + path, json=sent, headers=headers) as response:
            return response.status, await response.json()

    async def stream(self, path: str = COMPLETIONS) -> list[Any]:
        """Return the data of a stream's events."""
        async with self.http.post(self.url + path, json={"stream": True}) as response:
            assert response.status == 200, await response.text()
            text = await response.text()
        said = [one.removeprefix("data: ") for one in text.splitlines() if one[:6] == "data: "]
        return [one if one == DONE else json.loads(one) for one in said]


@contextlib.asynccontextmanager
async def served(app: web.Application) -> AsyncIterator[str]:
    """Run an application, and yield its address."""
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0]
    try:
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def fake_engine(answer: Answer) -> AsyncIterator[FakeEngine]:
    engine = FakeEngine(answer)
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", engine.serve)
    async with served(app) as engine.url:
        yield engine


@contextlib.asynccontextmanager
async def house(
    p: list[Answer],
    d: list[Answer],
    more_d: tuple[str, ...] = (),
    silence_s: float = 60.0,
    broker: AsyncAdminClient | None = None,
    find_s: float = 0.0,
) -> AsyncIterator[House]:
    """Run a router before engines with the ids p0, p1, ... and d0, d1, ...; ``more_d`` are URLs."""
    async with contextlib.AsyncExitStack() as stack:
        sides = [
            [await stack.enter_async_context(fake_engine(one)) for one in side] for side in (p, d)
        ]
        prefill, decode = (
            [RoutedEngine(one.url, f"{name}{number}") for number, one in enumerate(side)]
            for name, side in zip("pd", sides, strict=True)
        )
        decode += map(RoutedEngine, more_d)
        router = Router(prefill, decode, silence_s, broker, find_s)
        url = await stack.enter_async_context(served(router.app()))
        http = await stack.enter_async_context(ClientSession())
        yield House(url, http, sides[0], sides[1], decode)
