"""The router asks who holds a prompt, before vLLM's servers that tell it."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from aiohttp import ClientSession

from restow.broker.client import AsyncAdminClient, chain_of
from restow.broker.server.base.settings import BrokerSettings
from restow.broker.server.serve import running_broker
from restow.v1 import admin_pb2 as pb
from vllm_harness.house import GRANT_S, STEPS, drawn
from vllm_harness.served import complete, router, vllm_servers
from vllm_harness.tiny_models import tiny_model

pytestmark = pytest.mark.timeout(600)
BLOCK_TOKENS = 32
HELD_TOKENS = 128
"""Of a first turn's prompt, in whole blocks."""


async def handed_to(admin: AsyncAdminClient, engine_id: str) -> pb.HandoffInfo:
    """Return the last handoff to an engine."""
    found = (await admin.handoffs()).handoffs
    return max((h for h in found if h.destination_engine == engine_id), key=lambda one: one.number)


async def told(admin: AsyncAdminClient, engine_id: str, ids: list[int]) -> None:
    """Wait until an engine has told of a first turn's blocks."""
    chain = chain_of(ids[: HELD_TOKENS + 1])
    async with asyncio.timeout(60):
        while True:
            (holders,) = await admin.find([chain], engine_id="d0")
            if any((h.engine_id, h.tokens) == (engine_id, HELD_TOKENS) for h in holders):
                return


async def test_a_second_turn_is_sent_where_the_first_is_or_found_from_there(
    vllm_python: Path, tmp_path: Path
) -> None:
    model = tiny_model("llama", tmp_path / "model")
    settings = BrokerSettings(listen="127.0.0.1:0", grant_s=GRANT_S)
    async with AsyncExitStack() as stack:
        broker = (await stack.enter_async_context(running_broker(settings))).address
        names = ("p0", "p1", "d0")
        size = ("--block-size", str(BLOCK_TOKENS))
        servers = await stack.enter_async_context(
            vllm_servers(vllm_python, model, names, broker, tmp_path, *size)
        )
        d0_url = servers[2].url
        p0, p1, d0 = (f"{name}={one.url}" for name, one in zip(names, servers, strict=True))
        base = await stack.enter_async_context(
            router(broker, [p0, p1], [d0], tmp_path / "router.log")
        )
        http = await stack.enter_async_context(ClientSession())
        admin = await stack.enter_async_context(AsyncAdminClient(broker))
        for seed in range(3):
            ids = drawn(150, seed)
            said = await complete(http, base, ids, max_tokens=STEPS)
            first = (await handed_to(admin, "d0")).source_engine
            await told(admin, first, ids)
            turn = [*ids, *said, *drawn(20, 10 + seed)]
            again = await complete(http, base, turn, max_tokens=STEPS)
            assert (await handed_to(admin, "d0")).source_engine == first
            # Of another salt nothing is held: all of it is computed.
            alone = await complete(http, d0_url, turn, max_tokens=STEPS, cache_salt="alone")
            assert again == alone
        # The one that is asked then has it from where it is.
        await admin.drain_engine(first)
        third = [*turn, *again, *drawn(20, 20)]
        last = await complete(http, base, third, max_tokens=STEPS)
        assert (await handed_to(admin, "d0")).source_engine == (
            other := "p1" if first == "p0" else "p0"
        )
        assert (await handed_to(admin, other)).position_tokens >= HELD_TOKENS
        alone = await complete(http, d0_url, third, max_tokens=STEPS, cache_salt="alone")
        assert last == alone
