"""`restow store` in a process of its own, between vLLM engines."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator

from vllm_harness.engine import START_S


@contextlib.asynccontextmanager
async def store(broker: str, engine_id: str, name: str = "store") -> AsyncIterator[None]:
    """Run a store for the model of an engine, under a name, and wait until it is ready."""
    words = ["store", "--engine", engine_id, "--engine-id", name, "--memory", "1GiB"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "restow.broker.cli.main", *words, "--broker", broker),
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    said: list[str] = []
    try:
        async with asyncio.timeout(START_S):
            while "store ready" not in "".join(said[-1:]):
                said.append((await process.stderr.readline()).decode())
                assert said[-1], said
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.communicate()
