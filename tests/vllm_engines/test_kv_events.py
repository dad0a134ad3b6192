"""KV events of a broker are what vLLM's own classes decode, and encode to the same fields."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from broker.content.holders import FORM, PROMPT, heard, hold
from broker.fakes import broker, engine
from broker.observing.subscribers import numbers
from vllm_harness.programs import answers

pytestmark = pytest.mark.timeout(300)


async def test_vllm_decodes_the_events_and_would_encode_the_same_fields(
    vllm_python: Path, tmp_path: Path
) -> None:
    events, replays = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replays"
    async with (
        broker(kv_events=events, kv_events_replay=replays) as running,
        engine(running.address, "e") as (session, _),
    ):
        hold(session)
        await heard(running, "e", 2)
        session.evict(FORM, "attention", [PROMPT.hashes[6]])
        await heard(running, "e", 3)
        told = await asyncio.to_thread(
            answers, vllm_python, "kv_events_main.py", events, replays, 6
        )
    assert all(message["same_fields"] and message["rank"] == 0 for message in told)
    assert {message["topic"].split("@")[1] for message in told} == {"e"}
    assert [message["sequence"] for message in told] == list(range(len(told)))
    said = [event for message in told for event in message["events"]]
    kinds = ["AllBlocksCleared", *4 * ["BlockStored"], "BlockRemoved"]
    assert [event["type"] for event in said] == kinds
    stored, removed = said[3], said[-1]
    assert stored["block_hashes"] == numbers(PROMPT.hashes)
    assert stored["kv_cache_spec_kind"] == "full_attention"
    assert (stored["group_idx"], stored["block_size"], stored["medium"]) == (0, 16, "GPU")
    assert removed["block_hashes"] == numbers([PROMPT.hashes[6]])
