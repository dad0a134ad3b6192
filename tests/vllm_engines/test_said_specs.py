"""Layers made of vLLM's own specs are those that the families make of configs, at every TP."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from vllm_harness.engine import ENVIRONMENT, HERE

pytestmark = pytest.mark.timeout(600)
TPS = ("1", "2", "4", "8", "16")
MODELS: list[tuple[str, str, dict[str, Any]]] = [
    # model_type, vLLM's class of it, changes to its defaults
    ("mamba", "MambaForCausalLM", {"num_hidden_layers": 2}),
    ("mamba2", "Mamba2ForCausalLM", {"num_hidden_layers": 2}),
    ("jamba", "JambaForCausalLM", {"num_hidden_layers": 8}),
    (
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        {"layer_types": ["mamba", "attention"], "num_hidden_layers": 2},
    ),
    ("qwen3_next", "Qwen3NextForCausalLM", {"num_hidden_layers": 4}),
    (
        "lfm2",
        "Lfm2ForCausalLM",
        {"full_attn_idxs": [2, 5], "num_hidden_layers": 8, "conv_dim": 2560},
    ),
    ("gemma3_text", "Gemma3ForCausalLM", {"num_hidden_layers": 7, "sliding_window": 512}),
    ("deepseek_v3", "DeepseekV3ForCausalLM", {"num_hidden_layers": 2}),
]


async def test_families_and_specs_say_the_same(vllm_python: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        vllm_python,
        HERE / "said_main.py",
        json.dumps(MODELS),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, **ENVIRONMENT, "TORCH_COMPILE_DISABLE": "1"},
    )
    said, _ = await process.communicate()
    found = json.loads(said.decode().splitlines()[-1])
    wrong = {
        (name, tp): words
        for (name, _, _), answers in zip(MODELS, found, strict=True)
        for tp, words in answers.items()
        # What no TP of the family's can have, vLLM has none of either.
        if words not in ("same", "refused: TP_SIZE_NOT_ALLOWED")
    }
    assert not wrong
    assert all(answers["2"] == "same" and tuple(answers) == TPS for answers in found)
