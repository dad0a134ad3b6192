"""Prompts of several blocks, all at once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from vllm_harness.engine import Answer, Options
from vllm_harness.long_prompts import long_prompts
from vllm_harness.pair import MODEL, vllm_pair

pytestmark = pytest.mark.timeout(600)
STEPS = 16


async def test_prompts_of_several_blocks(vllm_python: Path, tmp_path: Path) -> None:
    prefill, decode = Options(MODEL), Options(MODEL, 2, conv_layout="DS")
    async with vllm_pair(vllm_python, tmp_path, prefill, decode) as pair:
        alone, prompts = pair.alone, long_prompts()
        assert alone is not None

        async def hand_over(number: int, ids: list[int]) -> Answer:
            params = {"handoff_id": f"h{number}"}
            first = pair.prefill.begin(ids, 1, params)
            answer = await pair.decode.ask(ids, STEPS, params)
            await pair.prefill.answer(first)
            return answer

        expected = [await alone.ask(ids, STEPS) for ids in prompts]
        found = await asyncio.gather(*(hand_over(i, ids) for i, ids in enumerate(prompts)))
        assert [one.tokens for one in found] == [one.tokens for one in expected]
        assert all(len(one.tokens) == STEPS for one in found)
