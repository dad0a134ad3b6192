"""Engines of a real vLLM, in an environment of its own: `./run vllm` sets it up."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from restow.demo.recall.task import Prompt, make_prompts


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """Return the interpreter that has vLLM."""
    found = os.environ.get("RESTOW_VLLM_PYTHON")
    if not found:
        pytest.skip("NO VLLM: these tests are run by ./run vllm, which installs it")
    return Path(found)


@pytest.fixture(scope="session")
def prompts() -> tuple[Prompt, ...]:
    """Make prompts that the model was not trained on."""
    return make_prompts(16, seed=1_000_003)
