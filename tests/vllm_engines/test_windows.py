"""Models with sliding windows whose D keeps what arrived: it finds whole blocks, and right ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from restow.broker.core.common.keys import State
from vllm_harness.engine import Options
from vllm_harness.house import STEPS, House, drawn, vllm_house
from vllm_harness.tiny_models import tiny_model

pytestmark = pytest.mark.timeout(600)
BLOCK_TOKENS = 32
"""As many as in a window, which so begins within a block nearly always."""
LENGTHS = (20, 58, 127, 128)
"""Inside of a window; such that the window of the last token begins within a block, and with the
last or the first token of one."""


async def test_d_finds_what_arrived_as_prefixes(vllm_python: Path, tmp_path: Path) -> None:
    # When blocks were filled only from where a window begins, a prompt that shares 96 tokens with a
    # prompt of 120 got wrong tokens.
    model = tiny_model("gemma3_text", tmp_path / "model")
    p = Options(model, 1, "kv_producer", prefix_caching=True, engine={"block_size": BLOCK_TOKENS})
    wanted = {"P": p, "D": replace(p, role="kv_consumer")}
    async with vllm_house(vllm_python, tmp_path, wanted) as house:
        prompts = [drawn(count, count) for count in LENGTHS]
        for ids in prompts:
            await check(house, ids)
        for ids in prompts[1:3]:
            await check_prefix(house, ids)
        # Of this prompt P has a part already, and null blocks before that.
        known = drawn(120, 120)
        await house["P"].ask(known[:110], 1)
        await check(house, known)
        await check_prefix(house, known)
        # Of this one D has a part, and loads the rest.
        longer = prompts[2][:100] + drawn(30, 30)
        assert await check(house, longer) == len(longer) - 1
        assert house.ended == {State.DONE: len(prompts) + 2}


async def check(house: House, ids: list[int]) -> int:
    """Check what D says after P; return how many tokens D did not compute."""
    name = f"{len(ids)} {house.ended.total()}"
    said = (await house.hand_over("P", "D", name, ids)).d
    assert said.tokens == (await house.alone("D", ids)).tokens, len(ids)
    return said.cached


async def check_prefix(house: House, ids: list[int]) -> None:
    """Ask D alone for another prompt that begins with all full blocks of an arrived prompt."""
    shared = (len(ids) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    other = ids[:shared] + ids[:9]
    said = await house["D"].ask(other, STEPS)
    assert said.tokens == (await house.alone("D", other)).tokens, len(ids)
    assert said.cached == shared
