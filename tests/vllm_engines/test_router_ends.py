"""What the router's clients hear when one of two D's is told to end."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from aiohttp import ClientSession, ClientTimeout

from restow.broker.server.base.settings import BrokerSettings
from restow.broker.server.serve import running_broker
from vllm_harness.finders import drawn
from vllm_harness.pair import GRANT_S
from vllm_harness.served import router, vllm_server
from vllm_harness.tiny_models import tiny_model

pytestmark = pytest.mark.timeout(900)
REQUESTS, AT_ONCE, TOKENS = 48, 8, 24
HEARS_S = 40.0
"""No client hears nothing for longer."""


async def heard(http: ClientSession, base: str, seed: int) -> str:
    """Ask, and return what came: "all", or "error". Fail for anything in between."""
    sent = {"model": "model", "temperature": 0.0, "ignore_eos": True, "stream": bool(seed % 2)}
    sent |= {"prompt": drawn(40, seed), "max_tokens": TOKENS}
    async with http.post(base + "/v1/completions", json=sent) as response:
        text = await response.text()
        if response.status != 200:
            assert json.loads(text)["error"], text
            return "error"
        if not sent["stream"]:
            answer = json.loads(text)
            assert answer["choices"][0]["finish_reason"] == "length", text
            assert answer["usage"]["completion_tokens"] == TOKENS, text
            return "all"
    events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    if events[-1] != "[DONE]":
        assert json.loads(events[-1])["error"], text
        return "error"
    assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length", text
    return "all"


async def test_nobody_hears_nothing_when_a_d_is_told_to_end(
    vllm_python: Path, tmp_path: Path
) -> None:
    model = tiny_model("llama", tmp_path / "model")
    settings = BrokerSettings(listen="127.0.0.1:0", grant_s=GRANT_S)
    processes: dict[str, asyncio.subprocess.Process] = {}
    async with AsyncExitStack() as stack:
        broker = (await stack.enter_async_context(running_broker(settings))).address
        p0, d0, d1 = await asyncio.gather(
            *(
                stack.enter_async_context(
                    vllm_server(
                        *(vllm_python, model, name, broker, tmp_path / name),
                        prefix="off",
                        processes=processes,
                    )
                )
                for name in ("p0", "d0", "d1")
            )
        )
        base = await stack.enter_async_context(
            router(broker, [p0], [d0, d1], tmp_path / "router.log", find_ms=0)
        )
        http = await stack.enter_async_context(ClientSession(timeout=ClientTimeout(None)))
        some, waited_s, done = asyncio.Semaphore(AT_ONCE), [], asyncio.Event()

        async def one(seed: int) -> str:
            async with some:
                began_s = time.monotonic()
                found = await heard(http, base, seed)
                waited_s.append(time.monotonic() - began_s)
                if len(waited_s) >= AT_ONCE:
                    done.set()
                return found

        asked = [asyncio.create_task(one(seed)) for seed in range(REQUESTS)]
        await asyncio.wait(
            [*asked, ended := asyncio.create_task(done.wait())], return_when="FIRST_COMPLETED"
        )
        await ended
        processes["d0"].terminate()
        found = await asyncio.gather(*asked)
        assert found.count("all") >= REQUESTS - AT_ONCE
        assert max(waited_s) < HEARS_S
