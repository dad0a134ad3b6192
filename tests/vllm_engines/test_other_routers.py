"""Routers that were made for vLLM's own connectors drive P and D through Restow, unchanged."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from aiohttp import ClientSession

from restow.broker.client import AsyncAdminClient
from restow.broker.server.serve import running_broker
from restow.broker.server.settings import BrokerSettings
from restow.v1 import broker_pb2 as pb
from vllm_harness.finders import STEPS, drawn
from vllm_harness.pair import GRANT_S
from vllm_harness.served import complete, other_router, vllm_server
from vllm_harness.tiny_models import tiny_model

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("name", ["vllm-router", "smg"])
async def test_they_ask_p_and_then_d(vllm_python: Path, tmp_path: Path, name: str) -> None:
    model = tiny_model("llama", tmp_path / "model")
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
        for seed in range(4):
            ids = drawn(40, seed)
            alone = await complete(http, d, ids, max_tokens=STEPS)
            assert await complete(http, base, ids, max_tokens=STEPS) == alone
        ended = (await admin.handoffs()).handoffs
        assert [(one.state, one.source_engine, one.destination_engine) for one in ended] == [
            (pb.HANDOFF_STATE_DONE, "p0", "d0")
        ] * 4
