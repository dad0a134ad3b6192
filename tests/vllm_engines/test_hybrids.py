"""Small models of all hybrid types that vLLM for the CPU can run, handed over by real engines."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

import pytest

from restow.agents.engines.recall.task import VOCABULARY_SIZE
from restow.broker.core.actions import State
from vllm_harness.checkpoints import write_checkpoint
from vllm_harness.closeness import assert_alike
from vllm_harness.engine import Answer, Options
from vllm_harness.hybrid_checkpoints import HYBRIDS
from vllm_harness.pair import vllm_pair

pytestmark = pytest.mark.timeout(900)
LENGTHS = (2, 7, 16, 33, 64, 150)
"""Of prompts: less than a window, less than a block and more, and several chunks of a scan."""
STEPS = 12


def prompts() -> list[list[int]]:
    rng = Random(7)  # noqa: S311 - reproducible, not secret
    return [[rng.randrange(8, VOCABULARY_SIZE) for _ in range(length)] for length in LENGTHS]


@pytest.mark.parametrize("decode_tp", [1, 2])
@pytest.mark.parametrize("name", HYBRIDS)
async def test_tokens_are_those_of_an_engine_that_serves_alone(
    vllm_python: Path, tmp_path: Path, name: str, decode_tp: int
) -> None:
    hybrid = HYBRIDS[name]
    hybrid.check_runs(vllm_python)
    model = write_checkpoint(hybrid.make, tmp_path / "model")
    engine = {"dtype": hybrid.dtype, "skip_tokenizer_init": False}
    prefill, decode = Options(model, 1, engine=engine), Options(model, decode_tp, engine=engine)
    async with vllm_pair(vllm_python, tmp_path, prefill, decode) as pair:
        assert pair.alone is not None

        async def hand_over(number: int, ids: list[int]) -> Answer:
            params = {"handoff_id": f"h{number}"}
            first = pair.prefill.begin(ids, 1, params)
            answer = await pair.decode.ask(ids, STEPS, params, logprobs=2)
            given = await pair.prefill.answer(first)
            assert given.params is not None
            assert given.params["remote_num_tokens"] == len(ids) - 1
            assert answer.cached == len(ids) - 1
            return answer

        asked = prompts()
        expected = [await pair.alone.ask(ids, STEPS, logprobs=2) for ids in asked]
        found = await asyncio.gather(*(hand_over(i, ids) for i, ids in enumerate(asked)))
        assert len({one.tokens for one in expected}) == len(asked)
        if hybrid.exact:
            assert [one.tokens for one in found] == [one.tokens for one in expected]
        assert assert_alike(found, expected) > len(asked) * STEPS / 2
        assert pair.broker.hub.directory.ledger.statistics.by_state == {State.DONE: len(asked)}
