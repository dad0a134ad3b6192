"""Routers that were made for vLLM's own connectors drive P and D through Restow, unchanged."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from aiohttp import ClientSession

from restow.broker.client import AsyncAdminClient
from restow.broker.server.base.settings import BrokerSettings
from restow.broker.server.serve import running_broker
from restow.v1 import broker_pb2 as pb
from vllm_harness.byte_tokenizer import VOCABULARY_SIZE, make_byte_tokenizer
from vllm_harness.checkpoints import write_checkpoint
from vllm_harness.hybrid_checkpoints import HYBRIDS
from vllm_harness.pair import GRANT_S
from vllm_harness.served import other_router, vllm_server

pytestmark = pytest.mark.timeout(600)
PROMPTS = (
    "Who has what? ",
    "The first of four prompts, and ",
    "Another one: ",
    "It is not known whether ",
)


async def complete(http: ClientSession, base: str, prompt: str) -> str:
    """Return the text that follows a prompt. Not every router takes a prompt of token ids."""
    body = {"model": "model", "prompt": prompt, "temperature": 0.0, "max_tokens": 12}
    async with http.post(f"{base}/v1/completions", json=body) as response:
        answer = await response.json()
        assert response.ok, answer
    text: str = answer["choices"][0]["text"]
    return text


@pytest.mark.parametrize("name", ["vllm-router", "smg"])
async def test_they_ask_p_and_then_d(vllm_python: Path, tmp_path: Path, name: str) -> None:
    hybrid = HYBRIDS["falcon_h1"]
    model = write_checkpoint(lambda: hybrid.make(vocab_size=VOCABULARY_SIZE), tmp_path / "model")
    make_byte_tokenizer().save_pretrained(model)
    async with AsyncExitStack() as stack:
        settings = BrokerSettings(listen="127.0.0.1:0", grant_s=GRANT_S)
        broker = (await stack.enter_async_context(running_broker(settings))).address
        p, d = await asyncio.gather(
            *(
                stack.enter_async_context(
                    vllm_server(vllm_python, model, one, broker, tmp_path / one, prefix="off")
                )
                for one in ("p0", "d0")
            )
        )
        base = await stack.enter_async_context(other_router(name, p, d, tmp_path / name))
        http = await stack.enter_async_context(ClientSession())
        admin = await stack.enter_async_context(AsyncAdminClient(broker))
        for prompt in PROMPTS:
            assert await complete(http, base, prompt) == await complete(http, d, prompt)
        ended = (await admin.handoffs()).handoffs
        assert [(one.state, one.source_engine, one.destination_engine) for one in ended] == [
            (pb.HANDOFF_STATE_DONE, "p0", "d0")
        ] * len(PROMPTS)
