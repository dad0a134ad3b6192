"""Small models of many types, handed over by engines that know a type, or vLLM's specs alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from restow.broker.core.common.keys import State
from vllm_harness.checkpoints import write_checkpoint
from vllm_harness.closeness import assert_alike
from vllm_harness.engine import Options
from vllm_harness.house import ONE_GROUP, STEPS, House, mixed_prompts, vllm_house
from vllm_harness.hybrid_checkpoints import HYBRIDS
from vllm_harness.tiny_models import NUMBERS, float8_kv, tiny_model

pytestmark = pytest.mark.timeout(900)
NO_FAMILIES = {"NO_FAMILIES_IN_TESTS": "1"}
BY_SPECS = ("llama", "gpt_oss", "gemma2", "mixtral")
"""Types that no engine knows here; of the others one does, by its family."""
AT_EQUAL_TP = ("llama", "gemma3_text", "nemotron_h", "falcon_h1", "qwen3_next")
"""Types that a third engine takes as well, of one rank as the first: there pages move whole."""
FLOAT8 = {"kv_cache_dtype": "fp8", "block_size": 32}
"""The CPU's attention has float8 in blocks of a multiple of 32 tokens."""


@pytest.mark.parametrize("model_type", [*NUMBERS, "nemotron_h", *HYBRIDS])
async def test_tokens_are_those_of_an_engine_that_serves_alone(
    vllm_python: Path, tmp_path: Path, model_type: str
) -> None:
    exact = True
    if model_type == "nemotron_h":
        one = Options(ONE_GROUP)
    elif model_type in NUMBERS:
        one = Options(tiny_model(model_type, tmp_path / "model"))
    else:
        hybrid = HYBRIDS[model_type]
        hybrid.check_runs(vllm_python)
        exact = hybrid.exact
        model = write_checkpoint(hybrid.make, tmp_path / "model")
        one = Options(model, engine={"dtype": hybrid.dtype, "skip_tokenizer_init": False})
    one = replace(one, role="kv_both")
    by_specs = replace(one, environment=NO_FAMILIES)
    wanted = {"1": by_specs if model_type in BY_SPECS else one, "2": replace(by_specs, tp=2)}
    ways = [("1", "2"), ("2", "1")]
    if model_type in AT_EQUAL_TP:
        wanted["another 1"] = by_specs
        ways.append(("1", "another 1"))
    async with vllm_house(vllm_python, tmp_path, wanted) as house:
        await check_ways(house, ways, exact)


async def test_float8_moves_between_engines_of_equal_scales(
    vllm_python: Path, tmp_path: Path
) -> None:
    # All sides say that they are of one checkpoint: the scales alone tell them apart.
    right, wrong = (
        float8_kv(tiny_model("llama", tmp_path / f"{scale}"), scale) for scale in (0.05, 0.06)
    )
    one = Options(right, role="kv_both", extra={"model_revision": "one"}, engine=FLOAT8)
    wanted = {
        "1": one,
        "2": replace(one, tp=2, environment=NO_FAMILIES),
        "other scales": replace(one, model=wrong),
    }
    async with vllm_house(vllm_python, tmp_path, wanted) as house:
        await check_ways(house, [("1", "2"), ("2", "1")])
        ids = list(range(8, 60))
        given = house["1"].begin(ids, 1, {"handoff_id": "refused", "do_remote_decode": True})
        asked = {"handoff_id": "refused", "do_remote_prefill": True}
        assert (await house["other scales"].ask(ids, 4, asked)).tokens == ()
        await house["1"].answer(given)
        failure = house.broker.hub.directory.ledger.ended["default", "refused"].failure
        assert failure is not None
        assert failure.reason == "SCALES_MISMATCH"
        assert "static k 0.05" in failure.detail


async def check_ways(house: House, ways: Sequence[tuple[str, str]], exact: bool = True) -> None:
    """Check that D says after P what the first engine says alone."""
    asked = mixed_prompts()
    found = {}
    for p, d in ways:
        handed = await asyncio.gather(
            *(
                house.hand_over(p, d, f"{p} to {d} {number}", ids, logprobs=2)
                for number, ids in enumerate(asked)
            )
        )
        found[p, d] = [one.d for one in handed]
    assert house.ended == {State.DONE: len(ways) * len(asked)}
    right = [await house.alone("1", ids, logprobs=2) for ids in asked]
    assert len({one.tokens for one in right}) == len(asked)
    for way, answers in found.items():
        if exact:
            assert [one.tokens for one in answers] == [one.tokens for one in right], way
        assert assert_alike(answers, right) > len(asked) * STEPS / 2
        # Of a model of the rule of N-1 the last token is computed.
        assert all(one.cached >= len(ids) - 1 for one, ids in zip(answers, asked, strict=True))
