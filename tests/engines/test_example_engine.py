"""docs/examples/engine.py, run as its page says, against the same model without a handoff."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cli.broker_process import broker_process

FILE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "engine.py"
PROMPT = [7, 0, 250, 999, 1, 1, 42]


def alone(prompt: list[int], steps: int) -> list[int]:
    """Return what the model says when its state never leaves it."""
    spec = importlib.util.spec_from_file_location("example_engine", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    h, tokens = np.zeros(module.HEADS), []
    for token in prompt:
        h = module.step(h, token)
    for _ in range(steps):
        tokens.append(int(h.sum()) % 1000)
        h = module.step(h, tokens[-1])
    return tokens


def begin(side: str, tp: int, broker: str, prompt: list[int]) -> subprocess.Popen[str]:
    command = [sys.executable, str(FILE), side, "--tp", str(tp), "--broker", broker, "--prompt"]
    return subprocess.Popen([*command, *map(str, prompt)], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(("p_tp", "d_tp"), [(4, 2), (1, 4), (2, 2)])
def test_it_says_what_an_engine_alone_says(p_tp: int, d_tp: int) -> None:
    with broker_process() as broker:
        p, d = begin("prefill", p_tp, broker, PROMPT), begin("decode", d_tp, broker, PROMPT)
        said, _ = d.communicate(timeout=60)
        freed, _ = p.communicate(timeout=60)
    # NIXL and the agents' log write there too, as late as they like.
    (tokens,) = [line for line in said.splitlines() if line.startswith("[")]
    assert json.loads(tokens) == alone(PROMPT, 8)
    assert "DONE" in freed


def test_it_is_short() -> None:
    assert len(FILE.read_text().splitlines()) < 100
