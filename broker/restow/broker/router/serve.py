"""The router's process: what it serves, and on what address."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus

from aiohttp import ClientSession, ClientTimeout, TCPConnector, web

from restow.broker.router.answers import error_answer
from restow.broker.router.bodies import ONE_TOKEN
from restow.broker.router.engines import Engines
from restow.broker.router.finding import Finding, FindSettings
from restow.broker.router.health import Health
from restow.broker.router.routing import Routing

CONNECT_S = 3.0
IDLE_S = 2.0
"""How long an idle connection is kept: less than engines do (vLLM's 5 s), for one that is closed
while a request is on its way looks like an engine that failed."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


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
    max_body_bytes: int = 64 << 20
    find: FindSettings | None = None
    """How the broker is asked who holds a prompt; None: it is not."""
    busy_tokens: int = 1000
    """How many tokens held outweigh one request more under way."""


async def router_app(settings: RouterSettings) -> web.Application:
    """All that is served."""
    http = ClientSession(
        timeout=ClientTimeout(total=None, sock_connect=CONNECT_S),
        connector=TCPConnector(limit=0, keepalive_timeout=IDLE_S),
    )
    prefill, decode = (
        Engines(side, settings.aside_s, settings.busy_tokens)
        for side in (settings.prefill, settings.decode)
    )
    finding = None
    if settings.find is not None:
        finding = Finding(http, settings.find, prefill, decode)
    routing = Routing(http, prefill, decode, finding)
    health = Health(http, prefill, decode, settings.look_s)
    app = web.Application(
        client_max_size=settings.max_body_bytes,
        middlewares=[web.middleware(_errors_as_openai_has_them)],
    )
    for path in ONE_TOKEN:
        app.router.add_post(path, routing.answer)
    app.router.add_get("/v1/models", routing.passed_on)
    app.router.add_get("/health", health.answer)

    async def life(app: web.Application) -> AsyncIterator[None]:
        watching = asyncio.create_task(health.watch())
        yield
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        if finding is not None:
            await finding.close()
        await http.close()

    app.cleanup_ctx.append(life)
    return app


def serve_router(settings: RouterSettings, host: str, port: int) -> None:
    """Serve until SIGTERM or SIGINT."""
    web.run_app(
        router_app(settings),
        host=host,
        port=port,
        # A client that leaves takes its requests to the engines with it.
        handler_cancellation=True,
        access_log=None,
        print=lambda text: print(text, flush=True),
    )


async def _errors_as_openai_has_them(request: web.Request, handler: Handler) -> web.StreamResponse:
    """What aiohttp itself refuses: other paths, other methods, bodies that are too large."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        status = HTTPStatus(error.status)
        if status < HTTPStatus.BAD_REQUEST:
            raise
        words = f"{request.method} {request.path}: {error.reason}"
        return error_answer(status, words, "invalid_request_error")
