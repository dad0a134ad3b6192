"""Small models of many types, whose layouts come from vLLM's own specs or from a family."""

from __future__ import annotations

from pathlib import Path

import pytest

from restow.demo.recall.model import checkpoint_folder
from vllm_harness.engine import Options
from vllm_harness.three_engines import assert_same_tokens, three_engines_answers
from vllm_harness.tiny_models import NUMBERS, tiny_model

pytestmark = pytest.mark.timeout(900)
ONE_GROUP = checkpoint_folder(1)
BY_SPECS = ("llama", "gpt_oss", "gemma2", "mixtral")
"""Types that no engine knows here; of the others one does, by its family."""


@pytest.mark.parametrize("model_type", [*NUMBERS, "nemotron_h"])
async def test_tokens_are_those_of_an_engine_that_serves_alone(
    vllm_python: Path, tmp_path: Path, model_type: str
) -> None:
    recall = model_type == "nemotron_h"  # with a group that every rank has whole
    model = ONE_GROUP if recall else tiny_model(model_type, tmp_path / "model")
    expected, answers = await three_engines_answers(
        vllm_python, tmp_path, Options(model), knowing=int(model_type not in BY_SPECS)
    )
    assert_same_tokens(expected, answers)
