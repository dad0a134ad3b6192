"""A reply that is being decoded moves to an engine of another TP, layout and block size."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from restow.agents.engines.vllm.scheduler.requests import MOVED_REASON
from restow.broker.client import AsyncAdminClient
from restow.broker.core.common.keys import State
from vllm_harness.engine import Options
from vllm_harness.house import MODEL, TELL, both_sides, drawn, vllm_house

pytestmark = pytest.mark.timeout(600)
STEPS = 40


async def test_replies_leave_an_engine_that_drains_and_go_on_from_their_last_token(
    vllm_python: Path, tmp_path: Path
) -> None:
    one = Options(MODEL, prefix_caching=True, extra=TELL)
    wanted = both_sides(one=one, other=replace(one, tp=2, conv_layout="DS"))
    prompts = [drawn(40 + number, number) for number in range(4)]
    async with (
        vllm_house(vllm_python, tmp_path, wanted) as house,
        AsyncAdminClient(house.broker.address) as admin,
    ):
        right = [await house.alone("one", ids, STEPS) for ids in prompts]
        before = house.ended
        replies = [
            asyncio.create_task(house["one"].ask(ids, STEPS, params={"movable": True}))
            for ids in prompts
        ]
        await asyncio.sleep(0.15)
        await admin.drain_engine("one")
        parts = [await reply for reply in replies]
        moved = [part for part in parts if part.stop_reason == MOVED_REASON]
        assert moved, "all replies had ended before the engine was drained"
        for ids, part, whole in zip(prompts, parts, right, strict=True):
            said = list(part.tokens)
            assert said == list(whole.tokens[: len(said)])
            if part.stop_reason != MOVED_REASON:
                assert len(said) == STEPS
                continue
            rest = STEPS - len(said)
            more = await house["other"].ask([*ids, *said], rest, params={"moved": True})
            assert (more.error, more.cached) == ("", len(ids) + len(said) - 1)
            assert [*said, *more.tokens] == list(whole.tokens)
        assert (house.ended - before)[State.DONE] == len(moved)
