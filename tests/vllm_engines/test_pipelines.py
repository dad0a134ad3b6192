"""Layers split over stages on one side, heads over ranks on the other.

vLLM refuses a stage without attention layers, so the model has twice the layers of the one that
`test_gated_delta_net` hands over; tokens are compared as there.
"""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from random import Random

import pytest

from restow.broker.core.common.keys import State
from restow.demo.recall.task import VOCABULARY_SIZE
from vllm_harness.checkpoints import write_checkpoint
from vllm_harness.closeness import assert_alike
from vllm_harness.engine import Answer, Options
from vllm_harness.hybrid_checkpoints import HYBRIDS
from vllm_harness.pair import vllm_pair

pytestmark = pytest.mark.timeout(600)
STEPS = 8
STAGES = {"pipeline_parallel_size": 2}


def prompts() -> list[list[int]]:
    """Return prompts within one block and over several."""
    rng = Random(5)  # noqa: S311 - reproducible, not secret
    return [[rng.randrange(8, VOCABULARY_SIZE) for _ in range(n)] for n in (2, 40, 385, 500, 800)]


@pytest.mark.parametrize("staged", ["P", "D"])
async def test_pipeline_stages(vllm_python: Path, tmp_path: Path, staged: str) -> None:
    model = write_checkpoint(
        partial(HYBRIDS["qwen3_next"].make, num_hidden_layers=8), tmp_path / "model"
    )
    engine = {
        "max_model_len": 1024,
        "dtype": "bfloat16",
        "skip_tokenizer_init": False,
        "worker_extension_cls": "vllm_harness.mended_workers.MendedWorkers",
    }
    stages = Options(model, 1, engine=engine | STAGES)
    ranks = Options(model, 2, engine=engine)
    prefill, decode = (stages, ranks) if staged == "P" else (ranks, stages)
    async with vllm_pair(vllm_python, tmp_path, prefill, decode) as pair:
        alone = pair.alone
        assert alone is not None

        async def hand_over(name: str, ids: list[int]) -> Answer:
            params = {"handoff_id": name}
            first = pair.prefill.begin(ids, 1, params)
            answer = await pair.decode.ask(ids, STEPS, params, logprobs=2)
            await pair.prefill.answer(first)
            return answer

        asked = prompts()
        expected = await asyncio.gather(*(alone.ask(ids, STEPS, logprobs=2) for ids in asked))
        found = await asyncio.gather(*(hand_over(f"h{i}", ids) for i, ids in enumerate(asked)))
        assert assert_alike(found, expected) > len(asked) * STEPS / 2
        assert pair.broker.hub.directory.ledger.statistics.by_state == {State.DONE: len(asked)}
