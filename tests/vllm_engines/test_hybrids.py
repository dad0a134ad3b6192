"""Small models of all hybrid types that vLLM for the CPU can run, handed over by real engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_harness.checkpoints import write_checkpoint
from vllm_harness.closeness import assert_alike
from vllm_harness.engine import Options
from vllm_harness.hybrid_checkpoints import HYBRIDS
from vllm_harness.three_engines import STEPS, assert_same_tokens, three_engines_answers

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("name", HYBRIDS)
async def test_tokens_are_those_of_an_engine_that_serves_alone(
    vllm_python: Path, tmp_path: Path, name: str
) -> None:
    hybrid = HYBRIDS[name]
    hybrid.check_runs(vllm_python)
    model = write_checkpoint(hybrid.make, tmp_path / "model")
    options = Options(model, engine={"dtype": hybrid.dtype, "skip_tokenizer_init": False})
    expected, answers = await three_engines_answers(vllm_python, tmp_path, options, knowing=1)
    if hybrid.exact:
        assert_same_tokens(expected, answers)
    for found in answers.values():
        assert assert_alike(found, expected) > len(expected) * STEPS / 2
