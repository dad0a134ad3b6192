"""vLLM's own model code, asked what its attention layers keep, at TP 1 to 16.

Text parts alone: the towers beside them keep nothing that a handoff moves.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from restow.broker.errors import TpSizeError
from restow.broker.families import AttentionSpec, EngineSettings
from restow.broker.families.build import layer_pages
from restow.broker.families.hf import model_from_hf_config

ROOT = Path(__file__).parents[2]
ANSWERS = json.loads((ROOT / "tests/families/attention_of_vllm.json").read_text())
TP = (1, 2, 4, 8, 16)


@pytest.fixture(scope="module")
def asked(vllm_python: Path) -> list[list[Any]]:
    """Return vLLM's answer for every config at every TP."""
    script = ROOT / "tests/vllm_harness/attention_layers.py"
    lines = "".join(json.dumps(config) + "\n" for config, _ in ANSWERS)
    done = subprocess.run(
        [vllm_python, script, *map(str, TP)],
        input=lines,
        stdout=subprocess.PIPE,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        text=True,
        check=True,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(answers) == len(ANSWERS)
    return answers


def test_the_answers_that_are_kept_are_vllms(asked: list[list[Any]]) -> None:
    for (config, kept), answers in zip(ANSWERS, asked, strict=True):
        layers = [[number, *form] for numbers, *form in kept for number in numbers]
        assert sorted(layers) == answers[0], config


def test_heads_and_pages_are_those_of_vllm(asked: list[list[Any]]) -> None:
    compared = 0
    for (config, _), answers in zip(ANSWERS, asked, strict=True):
        specs = model_from_hf_config(config).layers
        for tp, layers in zip(TP, answers, strict=True):
            if isinstance(layers, str):  # vLLM refuses this TP
                continue
            for spec, (number, heads, key, value, seen, dtype) in zip(specs, layers, strict=True):
                assert isinstance(spec, AttentionSpec)
                assert (spec.layer, spec.window_tokens) == (number, seen), config
                settings = EngineSettings(tp=tp, page_tokens=16)
                try:
                    (region,), shards = _pages(spec, settings)
                except TpSizeError:
                    pytest.fail(f"vLLM serves TP {tp}: {config}")
                assert [one.box[0].size for one in shards] == [heads] * 2, (config, tp)
                assert [one.box[1].size for one in shards] == [key, value], (config, tp)
                assert {one.dtype.label for one in shards} == {dtype}, (config, tp)
                assert region.page_stride_bytes == 16 * heads * (key + value) * 2
                compared += 1
    assert compared > 1000


def _pages(spec: AttentionSpec, settings: EngineSettings) -> tuple[Any, Any]:
    pages = layer_pages(spec, settings, settings.tp - 1)
    return pages.regions, pages.shards
