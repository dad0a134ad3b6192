"""Two vLLM engines that keep states in LMCache's server, a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

from forked.ports import free_port
from vllm_harness.engine import Options, VllmEngine, vllm_engine

NAME = "LMCache's server"
CHUNK_TOKENS = 256
SOON_S = 60.0
LOOK_S = 0.02
UNTOLD = {"DO_NOT_TRACK": "1"}
"""LMCache's server would tell its makers that it is used."""


@dataclass
class LmcachePair:
    """The engines, and the words of their server."""

    one: VllmEngine
    other: VllmEngine
    log: Path
    stored_tokens: int = 0

    async def stored(self, tokens: int) -> None:
        """Wait until so many tokens more are stored: of a prompt, its whole chunks."""
        self.stored_tokens += tokens // CHUNK_TOKENS * CHUNK_TOKENS
        async with asyncio.timeout(SOON_S):
            while self._told() < self.stored_tokens:  # noqa: ASYNC110 - it tells no events
                await asyncio.sleep(LOOK_S)

    def _told(self) -> int:
        return sum(map(int, re.findall(r"Stored (\d+) tokens", self.log.read_text())))


@contextlib.asynccontextmanager
async def lmcache_pair(python: Path, logs: Path, options: Options) -> AsyncIterator[LmcachePair]:
    """Start all; ``python`` is of an environment with vLLM and LMCache (docs/peers.md)."""
    port = free_port()
    words = "-m lmcache.cli.main server --l1-size-gb 2 --eviction-policy LRU"
    words += " --supported-transfer-mode auto --disable-metrics"
    ports = "--port", str(port), "--http-port", str(free_port())
    log = logs / "lmcache.log"
    pair = replace(
        options,
        connector="LMCacheMPConnector",
        role="kv_both",
        extra={"lmcache.mp.port": port},
        environment=options.environment | UNTOLD,
    )
    with log.open("wb") as out:
        server = await asyncio.create_subprocess_exec(
            python, *words.split(), *ports, stdout=out, stderr=out, env=os.environ | UNTOLD
        )
    try:
        async with contextlib.AsyncExitStack() as stack:
            one, other = await asyncio.gather(
                *(
                    stack.enter_async_context(vllm_engine(python, pair, logs / f"lmcache-{name}"))
                    for name in ("one", "other")
                )
            )
            yield LmcachePair(one, other, log)
    finally:
        with contextlib.suppress(ProcessLookupError):
            server.terminate()
        await server.wait()
