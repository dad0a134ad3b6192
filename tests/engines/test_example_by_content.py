"""docs/examples/by_content.py: an engine takes what another one holds, and says the same words."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cli.broker_process import broker_process, run_restow
from engines.test_example_engine import alone

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
PROMPT: list[int] = json.loads((EXAMPLES / "prompt.json").read_text())


def begin(side: str, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(EXAMPLES / "by_content.py"), side, *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def asked(*options: str) -> tuple[str, list[int]]:
    """Ask the example engine; return its line about the state, and its tokens."""
    said, _ = begin("ask", *options).communicate(timeout=60)
    lines = said.splitlines()
    (tokens,) = [line for line in lines if line.startswith("[")]
    return next((line for line in lines if " tokens from " in line), ""), json.loads(tokens)


@pytest.mark.parametrize(("hold_tp", "ask_tp"), [(4, 2), (1, 4)])
def test_what_one_holds_another_goes_on_from(hold_tp: int, ask_tp: int, tmp_path: Path) -> None:
    longer, other = tmp_path / "longer.json", tmp_path / "other.json"
    longer.write_text(json.dumps([*PROMPT, 7, 7]))
    other.write_text(json.dumps([1, *PROMPT]))
    with broker_process() as broker:
        holder = begin("hold", "--tp", str(hold_tp), "--broker", broker)
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
