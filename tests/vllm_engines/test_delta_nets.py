"""Gated delta nets: prefixes that P and D have each cached, and stages of a pipeline.

In vLLM for the CPU they compute in bfloat16 only, and prefilling a token rounds otherwise than
decoding it. So where an engine that serves alone hardly preferred its token, another may be right.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from restow.broker.core.common.keys import State
from vllm_harness.checkpoints import write_checkpoint
from vllm_harness.closeness import assert_alike
from vllm_harness.engine import Options
from vllm_harness.house import STEPS, Handed, drawn, forgotten, vllm_house
from vllm_harness.hybrid_checkpoints import HYBRIDS

pytestmark = pytest.mark.timeout(900)
MAKE = HYBRIDS["qwen3_next"].make
ENGINE = {"max_model_len": 1024, "dtype": "bfloat16", "skip_tokenizer_init": False}
MENDED = {"worker_extension_cls": "vllm_harness.mended_workers.MendedWorkers"}
WAYS = [("1", "2"), ("2", "1")]


def alike_prompts() -> list[list[int]]:
    """Return a prompt, the same prompt repeated, longer and shorter, and other prompts.

    Some of the others begin like the first prompt, and the last of them does not.
    """
    first = drawn(900, 3)
    return [
        *(first[:count] for count in (400, 400, 500, 386, 385, 384)),
        first[:300] + drawn(130, 4),
        first[:390] + drawn(40, 5),
        *(first[:count] for count in (800, 900)),
        first[:760] + drawn(60, 6),
        drawn(40, 7),
    ]


async def test_p_and_d_have_cached_some_of_what_came_before(
    vllm_python: Path, tmp_path: Path
) -> None:
    model = write_checkpoint(MAKE, tmp_path / "model")
    one = Options(model, role="kv_both", prefix_caching=True, engine=ENGINE)
    async with vllm_house(vllm_python, tmp_path, {"1": one, "2": replace(one, tp=2)}) as house:
        asked = alike_prompts()
        for p, d in WAYS:
            for engine in house.engines.values():
                await forgotten(engine)

            async def hand_over(name: str, ids: list[int], p: str = p, d: str = d) -> Handed:
                return await house.hand_over(p, d, f"{p} to {d} {name}", ids, logprobs=2)

            one_by_one = [await hand_over(f"one {i}", ids) for i, ids in enumerate(asked)]
            at_once = await asyncio.gather(
                *(hand_over(f"all {i}", ids) for i, ids in enumerate(asked))
            )
            right = [await house.alone(d, ids, logprobs=2) for ids in asked]
            for found in (one_by_one, at_once):
                assert assert_alike([one.d for one in found], right) > len(asked) * STEPS / 2
            print("not computed by D and by P:", [(d.cached, p.cached) for p, d in one_by_one])
            # D asked P for all but one token, also where its keys of earlier prompts reach that
            # far.
            assert [one.d.cached for one in one_by_one] == [len(ids) - 1 for ids in asked]
            # What P had is told by vLLM's blocks, which it chooses by the processor (256 tokens, or
            # 384), and it may keep none of its first request.
            assert sum(one.p.cached > 0 for one in one_by_one) >= 4
            assert one_by_one[0].p.cached == one_by_one[-1].p.cached == 0
            ledger = house.broker.hub.directory.ledger.ended
            assert ledger["default", f"{p} to {d} one 0"].failure is None
        reasons = {one.failure.reason for one in ledger.values() if one.failure}
        assert reasons <= {"DECLINED"}
        ended = house.ended
        assert ended[State.DONE] + ended[State.CANCELLED] == len(WAYS) * 2 * len(asked)
        # Without the setting `prefix` the broker hears nothing of what is cached.
        prefixes = house.broker.hub.directory.prefixes
        assert (prefixes.asked, prefixes.holders) == (0, {})


async def test_layers_in_stages_on_one_side_and_heads_over_ranks_on_the_other(
    vllm_python: Path, tmp_path: Path
) -> None:
    # vLLM refuses a stage without attention layers, so the model has twice the layers.
    model = write_checkpoint(partial(MAKE, num_hidden_layers=8), tmp_path / "model")
    one = Options(model, role="kv_both", engine=ENGINE | MENDED)
    wanted = {
        "stages": replace(one, engine=one.engine | {"pipeline_parallel_size": 2}),
        "ranks": replace(one, tp=2),
    }
    async with vllm_house(vllm_python, tmp_path, wanted) as house:
        asked = [drawn(count, count) for count in (2, 40, 385, 500, 800)]
        for p, d in (("stages", "ranks"), ("ranks", "stages")):
            found = await asyncio.gather(
                *(
                    house.hand_over(p, d, f"{p} {number}", ids, 8, logprobs=2)
                    for number, ids in enumerate(asked)
                )
            )
            right = [await house.alone(d, ids, 8, logprobs=2) for ids in asked]
            assert assert_alike([one.d for one in found], right) > len(asked) * 4
        assert house.ended == {State.DONE: 2 * len(asked)}
