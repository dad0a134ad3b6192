"""Engines that compute nothing, but know what a prefix cache would hold and count tokens.

They speak the HTTP that the router and the benchmark use, name their counters as vLLM does, and
report to a real broker what they hold. As in vLLM, a block is found by all tokens up to its end,
and the end of what was used longest ago is evicted first.
"""

from __future__ import annotations

import json
import uuid
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random
from typing import Any

from aiohttp import web

from restow.broker.client import EngineSession, chain_of
from restow.broker.families import AttentionSpec, EngineSettings, ModelSpec, build_layout
from restow.broker.layout import DType
from restow.broker.server.base.settings import BrokerSettings
from restow.broker.server.serve import running_broker

BLOCK_TOKENS = 16
MODEL = ModelSpec("counting", (AttentionSpec(0, 8, 64, DType.BFLOAT16),), revision="1")
SOURCES = "vllm:prompt_tokens_by_source_total"
COMPUTED, HELD, MOVED = "local_compute", "local_cache_hit", "external_kv_transfer"


class CountingEngine:
    """An engine, which belongs to an event loop."""

    def __init__(self, session: EngineSession, room_tokens: int) -> None:
        """Make an engine whose cache has room for ``room_tokens``."""
        self._session, self._room_blocks = session, room_tokens // BLOCK_TOKENS
        self._held: OrderedDict[bytes, None] = OrderedDict()
        """Hashes of blocks; the next to be evicted comes first."""
        self._sources: Counter[str] = Counter()
        self._random = Random(session.ref.engine_id)  # noqa: S311

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Answer any request."""
        if request.path == "/metrics":
            lines = [f'{SOURCES}{{source="{source}"}} {n}\n' for source, n in self._sources.items()]
            return web.Response(text="".join(lines))
        if request.path == "/health":
            return web.Response()
        body: dict[str, Any] = await request.json()
        prompt: list[int] = body["prompt"]
        reply = [self._random.randrange(1, 1000) for _ in range(body["max_tokens"])]
        held_tokens = self._held_tokens(prompt)
        decodes = body["kv_transfer_params"].get("do_remote_prefill")
        self._sources[HELD] += held_tokens
        self._sources[MOVED if decodes else COMPUTED] += len(prompt) - held_tokens
        self._keep([*prompt, *reply[:-1]] if decodes else prompt)
        event = {"choices": [{"text": "", "token_ids": reply, "finish_reason": "length"}]}
        if not body.get("stream"):
            return web.json_response(event)
        text = f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n"
        return web.Response(text=text, content_type="text/event-stream")

    def _held_tokens(self, prompt: Sequence[int]) -> int:
        """Count the tokens of whole blocks that are held; at least one token is left to compute."""
        blocks = 0
        for block_hash in chain_of(prompt[:-1], BLOCK_TOKENS).hashes:
            if block_hash not in self._held:
                break
            blocks += 1
        return blocks * BLOCK_TOKENS

    def _keep(self, tokens: Sequence[int]) -> None:
        """Keep all whole blocks, and report what came and went."""
        chain = chain_of(tokens, BLOCK_TOKENS)
        new = [block_hash for block_hash in chain.hashes if block_hash not in self._held]
        for block_hash in reversed(chain.hashes):
            self._held[block_hash] = None
            self._held.move_to_end(block_hash)
        count = max(len(self._held) - self._room_blocks, 0)
        evicted = [self._held.popitem(last=False)[0] for _ in range(count)]
        if new:
            self._session.hold(chain.form, "attention", new)
        if evicted:
            self._session.evict(chain.form, "attention", evicted)


@asynccontextmanager
async def counting_engines(
    count: int, room_tokens: int
) -> AsyncIterator[tuple[str, list[str], list[str]]]:
    """Run a broker, and P and D engines; yield their addresses as the router takes them."""
    layout = build_layout(MODEL, EngineSettings(tp=1, page_tokens=BLOCK_TOKENS))
    async with AsyncExitStack() as stack:
        broker = await stack.enter_async_context(
            running_broker(BrokerSettings(listen="127.0.0.1:0"))
        )
        sides: dict[str, list[str]] = {"p": [], "d": []}
        for side, named in sides.items():
            for number in range(count):
                session = EngineSession(f"{side}{number}", uuid.uuid4().hex, layout, broker.address)
                await stack.enter_async_context(session)
                engine = CountingEngine(session, room_tokens)
                app = web.Application(client_max_size=1 << 30)
                app.router.add_route("*", "/{path:.*}", engine.serve)
                url = await stack.enter_async_context(served(app))
                named.append(f"{side}{number}={url}")
        yield broker.address, sides["p"], sides["d"]


@asynccontextmanager
async def served(app: web.Application) -> AsyncIterator[str]:
    """Serve an application; yield its address."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0]
    try:
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()
