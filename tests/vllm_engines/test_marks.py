"""A request marks where its state is worth keeping, and real engines and a store keep it there."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from restow.broker.client import AsyncAdminClient
from vllm_harness.checkpoints import write_checkpoint
from vllm_harness.closeness import assert_alike
from vllm_harness.engine import Options
from vllm_harness.house import STEPS, TELL, both_sides, drawn, store, vllm_house
from vllm_harness.hybrid_checkpoints import HYBRIDS

pytestmark = pytest.mark.timeout(600)
SYSTEM_TOKENS = 600
KEPT_TOKENS = 384
"""The end of the last block before the mark, in blocks of 384 tokens."""


async def test_a_recurrent_state_is_kept_at_a_mark_and_found_by_other_engines(
    vllm_python: Path, tmp_path: Path
) -> None:
    model = write_checkpoint(HYBRIDS["qwen3_next"].make, tmp_path / "model")
    engine = {"max_model_len": 1024, "dtype": "bfloat16", "skip_tokenizer_init": False}
    one = Options(model, prefix_caching=True, extra=TELL, engine=engine)
    wanted = both_sides(one=one, other=replace(one, tp=2))
    system, unmarked = drawn(SYSTEM_TOKENS), drawn(SYSTEM_TOKENS, 5)
    marks = {"marks": [100, SYSTEM_TOKENS]}
    async with (
        vllm_house(vllm_python, tmp_path, wanted) as house,
        store(house.broker.address, "one"),
    ):
        asked = [system + drawn(200, 1), system + drawn(200, 2)]
        first = await house["one"].ask(asked[0], STEPS, params=marks, logprobs=2)
        assert (first.error, first.cached) == ("", 0)
        assert first.params == {"marks": [0, KEPT_TOKENS]}
        await house.told("store", system, KEPT_TOKENS)
        await house.leave("one")
        # Forks that come at once: one of them reads the state, the others wait for it.
        forks = [*asked[1:], *(system + drawn(200, seed) for seed in (3, 4, 5))]
        second, *others = await asyncio.gather(
            *(house["other"].ask(ids, STEPS, params=marks, logprobs=2) for ids in forks)
        )
        assert [(one.error, one.cached) for one in (second, *others)] == [("", KEPT_TOKENS)] * 4
        async with AsyncAdminClient(house.broker.address) as admin:
            done = (await admin.handoffs("DONE")).handoffs
        assert [one.source_engine for one in done if one.destination_engine == "other"] == ["store"]
        right = [await house.alone("other", ids, logprobs=2) for ids in asked]
        assert assert_alike([first, second], right) > STEPS
        # Without a mark the state stands only at the end of each prompt.
        for number in range(2):
            plain = await house["other"].ask(unmarked + drawn(200, 6 + number), STEPS)
            assert (plain.cached, plain.params) == (0, None)
