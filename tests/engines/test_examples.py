"""The engines of docs/examples, run as their pages say, against the same model in one process."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cli.broker_process import broker_process, run_restow

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
FILE = EXAMPLES / "engine.py"
SHORT = [7, 0, 250, 999, 1, 1, 42]
PROMPT: list[int] = json.loads((EXAMPLES / "prompt.json").read_text())


@pytest.fixture(scope="module")
def broker() -> Iterator[str]:
    with broker_process() as address:
        yield address


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


def begin(file: str, side: str, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(EXAMPLES / file), side, *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def tokens_in(said: str) -> list[int]:
    """Return the tokens that an example has printed; NIXL and the agents' log print there too."""
    (line,) = [line for line in said.splitlines() if line.startswith("[")]
    tokens: list[int] = json.loads(line)
    return tokens


@pytest.mark.parametrize(("p_tp", "d_tp"), [(4, 2), (1, 4), (2, 2)])
def test_it_says_what_an_engine_alone_says(broker: str, p_tp: int, d_tp: int) -> None:
    told = ("--broker", broker, "--handoff-id", f"{p_tp} to {d_tp}", "--prompt", *map(str, SHORT))
    p, d = (
        begin("engine.py", side, "--tp", f"{tp}", *told)
        for side, tp in (("prefill", p_tp), ("decode", d_tp))
    )
    said, _ = d.communicate(timeout=60)
    freed, _ = p.communicate(timeout=60)
    assert tokens_in(said) == alone(SHORT, 8)
    assert "DONE" in freed


@pytest.mark.parametrize(("p_tp", "d_tp", "d_page"), [(4, 2, 8), (1, 4, 3)])
def test_attention_is_handed_over_between_pages_of_other_sizes(
    p_tp: int, d_tp: int, d_page: int
) -> None:
    with broker_process() as broker:  # both tests have one handoff id
        pages = {"prefill": (p_tp, 4), "decode": (d_tp, d_page)}
        p, d = (
            begin(
                "attention.py",
                *(side, "--tp", f"{tp}", "--page-tokens", f"{page}", "--broker", broker),
            )
            for side, (tp, page) in pages.items()
        )
        said, _ = d.communicate(timeout=60)
        freed, _ = p.communicate(timeout=60)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    whole = sum(
        at * token * (head + 1) * head for at, token in enumerate(prompt, 1) for head in range(8)
    )
    assert tokens_in(said) == [whole % 1000]
    assert "DONE" in freed


def test_it_is_short() -> None:
    assert len(FILE.read_text().splitlines()) < 100


def asked(*options: str) -> tuple[str, list[int]]:
    """Ask the example engine; return its line about the state, and its tokens."""
    said, _ = begin("by_content.py", "ask", *options).communicate(timeout=60)
    lines = (line for line in said.splitlines() if " tokens from " in line)
    return next(lines, ""), tokens_in(said)


@pytest.mark.parametrize(("hold_tp", "ask_tp"), [(4, 2), (1, 4)])
def test_what_one_holds_another_goes_on_from(
    broker: str, hold_tp: int, ask_tp: int, tmp_path: Path
) -> None:
    longer, other = tmp_path / "longer.json", tmp_path / "other.json"
    longer.write_text(json.dumps([*PROMPT, 7, 7]))
    other.write_text(json.dumps([1, *PROMPT]))
    holder = begin("by_content.py", "hold", "--tp", str(hold_tp), "--broker", broker)
    try:
        tp = ("--tp", str(ask_tp), "--broker", broker)
        for path in (EXAMPLES / "prompt.json", longer):
            prompt = json.loads(path.read_text())
            words, tokens = asked(*tp, "--prompt", str(path), "--within-s", "60")
            assert words == f"32 of {len(prompt)} tokens from holder: DONE"
            assert tokens == alone(prompt, 8)
        words, tokens = asked(*tp, "--prompt", str(other), "--within-s", "0")
        assert (words, tokens) == ("", alone([1, *PROMPT], 8))
        found = run_restow(
            *("find", str(longer), "--engine", "holder", "--broker", broker, "--json")
        )
        (one,) = json.loads(found.stdout)["holders"]
        assert (one["engine_id"], one["tokens"]) == ("holder", 32)
    finally:
        holder.send_signal(signal.SIGTERM)
        holder.wait(30)
        assert holder.stdout is not None
        holder.stdout.close()
