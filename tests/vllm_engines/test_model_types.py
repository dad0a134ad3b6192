"""Small models of many types, whose layouts come from vLLM's own specs or from a family."""

from __future__ import annotations

from pathlib import Path

import pytest

from restow.agents.engines.recall.model import checkpoint_folder
from vllm_harness.engine import Options
from vllm_harness.three_engines import WAYS, three_engines_answers
from vllm_harness.tiny_models import tiny_model

pytestmark = pytest.mark.timeout(900)
ONE_GROUP = checkpoint_folder(1)


@pytest.mark.parametrize(
    ("model_type", "first_knows"),
    [
        ("llama", False),
        ("gpt_oss", False),
        ("gemma3_text", True),
        ("qwen3_moe", True),
        ("mistral", True),
        ("gemma2", False),
        ("olmo3", True),
        ("cohere2", True),
        ("recall", True),
    ],
)
async def test_tokens_are_those_of_an_engine_that_serves_alone(
    vllm_python: Path, tmp_path: Path, model_type: str, first_knows: bool
) -> None:
    """The first engine's connector may know the type by its family; the others' never do."""
    recall = model_type == "recall"  # Nemotron-H, with a group that every rank has whole
    model = ONE_GROUP if recall else tiny_model(model_type, tmp_path / "model")
    expected, answers = await three_engines_answers(
        vllm_python, tmp_path, Options(model), first_knows
    )
    assert len(set(expected)) == len(expected)
    assert answers == dict.fromkeys(WAYS, expected)
