"""D reads keys and values of a prompt that P still computes, step by step."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agent_harness.waiting import until
from restow.broker.server.serve import RunningBroker
from vllm_engines.test_long_prompts import long_prompts
from vllm_harness.engine import Options
from vllm_harness.pair import MODEL, vllm_pair

pytestmark = pytest.mark.timeout(600)
STEPS = 16
STEP_TOKENS = {"max_num_batched_tokens": 32, "enable_chunked_prefill": True}


def read_early(broker: RunningBroker, name: str) -> list[object]:
    """Up to which tokens of a handoff, by its timeline."""
    handoff = broker.hub.directory.ledger.find("default", name)
    return [detail for _, event, detail in handoff.timeline if event == "read early"]


async def test_leading_tokens_are_read_while_p_computes(vllm_python: Path, tmp_path: Path) -> None:
    prefill, decode = Options(MODEL, engine=STEP_TOKENS), Options(MODEL, 2, conv_layout="DS")
    async with vllm_pair(vllm_python, tmp_path, prefill, decode, early_bytes=0) as pair:
        alone, prompts = pair.alone, long_prompts()[:3]
        assert alone is not None
        expected = [await alone.ask(ids, STEPS) for ids in prompts]
        live = pair.broker.hub.directory.ledger.live
        for number, ids in enumerate(prompts):
            name = f"h{number}"
            answer = asyncio.create_task(pair.decode.ask(ids, STEPS, {"handoff_id": name}))
            await until(lambda name=name: ("default", name) in live)  # type: ignore[misc]
            await pair.prefill.ask(ids, 1, {"handoff_id": name})
            assert (await answer).tokens == expected[number].tokens
            assert read_early(pair.broker, name)
