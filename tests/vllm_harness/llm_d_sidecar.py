"""A double of llm-d's sidecar with ``--kv-connector=nixlv2``: it asks P, then D.

It does what `pkg/sidecar/proxy/connector_nixlv2.go` of llm-d-router does (commit ebab6879): P gets
the client's body with ``do_remote_decode`` and null ``remote_*``, without streaming and with one
token; D gets the client's body with P's ``kv_transfer_params``. P is asked again after 502, 503
and 504; another error of P is the client's answer.

With ``--moriio-write-mode --moriio-parallel-dispatch`` it asks both at once, with one
``transfer_id``. The client gets D's answer when P has answered. If P fails, D's request is
cancelled and P's answer is the client's.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import ClientConnectionError, ClientResponse, ClientSession, ClientTimeout, web

TRIED_AGAIN = (502, 503, 504)
RETRIES, PAUSE_S = 2, 0.1
LIMITS = ("max_tokens", "max_completion_tokens")
PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


async def _nothing() -> None:
    """Do nothing between P's answer and D's request."""


@dataclass(eq=False)
class Sidecar:
    """The sidecar of one D, which asks the P of ``prefill``."""

    prefill: str
    decode: str
    lost_answers: int = 0
    """The number of answers of P that do not reach the sidecar."""
    parallel: bool = False
    """Ask P and D at once."""
    before_decode: Callable[[], Awaitable[None]] = _nothing
    params: list[Any] = field(default_factory=list)
    """The ``kv_transfer_params`` of P's answers, in the order in which D was asked."""

    def __post_init__(self) -> None:
        self.url = ""
        self._http: ClientSession

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[Sidecar]:
        """Serve on a free port."""
        app = web.Application()
        app.router.add_post("/{path:.*}", self._handle)
        runner = web.AppRunner(app)
        async with ClientSession(timeout=ClientTimeout(None)) as self._http:
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            host, port = runner.addresses[0][:2]
            self.url = f"http://{host}:{port}"
            try:
                yield self
            finally:
                await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        headers = {"X-Request-Id": (request_id := str(uuid.uuid4()))}
        if self.parallel:
            return await self._ask_both(request, asked, headers, f"tx{request_id}")
        status, answer = await self._ask_p(request.path, asked, headers, PREFILL)
        if status >= 400:
            return web.json_response(answer, status=status)
        params = answer.get("kv_transfer_params")
        self.params.append(params)
        await self.before_decode()
        body = {**asked, "kv_transfer_params": params}
        async with self._http.post(self.decode + request.path, json=body, headers=headers) as d:
            return await _passed_on(request, d)

    async def _ask_both(
        self, request: web.Request, asked: Any, headers: dict[str, str], transfer_id: str
    ) -> web.StreamResponse:
        named = {"transfer_id": transfer_id, "tp_size": 1, "remote_dp_size": 1}
        of_d = {**PREFILL, "do_remote_decode": False, "do_remote_prefill": True, **named}
        of_d |= {"remote_engine_id": "p:1", "remote_block_ids": [], "remote_host": "p"}
        self.params.append(of_d)
        body = {**asked, "kv_transfer_params": of_d}
        asks_d = self._http.post(self.decode + request.path, json=body, headers=headers)
        d = asyncio.ensure_future(asks_d)
        of_p = {**PREFILL, "remote_host": "d", **named}
        status, answer = await self._ask_p(request.path, asked, headers, of_p)
        if status >= 400:
            d.cancel()
            return web.json_response(answer, status=status)
        async with await d as told:
            return await _passed_on(request, told)

    async def _ask_p(
        self, path: str, asked: Any, headers: dict[str, str], params: dict[str, Any]
    ) -> tuple[int, Any]:
        body = {key: value for key, value in asked.items() if key != "stream_options"}
        limits = {key: 1 for key in LIMITS if key in asked} or {LIMITS[0]: 1}
        body |= {**limits, "stream": False, "kv_transfer_params": params}
        status, answer = 502, None
        for attempt in range(1 if self.parallel else RETRIES + 1):
            if attempt:
                await asyncio.sleep(PAUSE_S)
            try:
                async with self._http.post(self.prefill + path, json=body, headers=headers) as p:
                    status, answer = p.status, await p.json()
            except ClientConnectionError:
                status, answer = 502, None
            if self.lost_answers:
                self.lost_answers -= 1
                status, answer = 502, None
            if status not in TRIED_AGAIN:
                break
        return status, answer


async def _passed_on(request: web.Request, answer: ClientResponse) -> web.StreamResponse:
    told = web.StreamResponse(status=answer.status)
    told.content_type = answer.content_type
    await told.prepare(request)
    async for piece in answer.content.iter_any():
        await told.write(piece)
    return told
