"""An SGLang engine without a model: a process for each rank, all given the same commands."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]


@dataclass(frozen=True)
class SglangEngine:
    ranks: tuple[subprocess.Popen[str], ...]

    def each(self, do: str, **given: Any) -> list[dict[str, Any]]:
        """Give all ranks a command, and return what each answers."""
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.write(json.dumps({"do": do, **given}) + "\n")
            rank.stdin.flush()
        return [_answer(rank) for rank in self.ranks]

    def all(self, do: str, **given: Any) -> dict[str, Any]:
        """Give all ranks a command; they must answer alike."""
        answers = self.each(do, **given)
        assert all(answer == answers[0] for answer in answers), answers
        return answers[0]


def _answer(rank: subprocess.Popen[str]) -> dict[str, Any]:
    assert rank.stdout is not None
    for line in rank.stdout:
        if line.startswith("ANSWER "):
            answer: dict[str, Any] = json.loads(line.removeprefix("ANSWER "))
            return answer
    raise AssertionError(f"a rank ended with {rank.wait()}: its log says why")


@contextlib.contextmanager
def sglang_engine(
    packages: Path,
    folder: Path,
    model: Path,
    broker: str,
    tp: int = 1,
    page: int = 16,
    name: str = "sglang",
    extra: dict[str, Any] | None = None,
    **more: Any,
) -> Iterator[SglangEngine]:
    """Start an engine's ranks, without their linkers; ``packages`` has SGLang's Python."""
    options = {
        "model": str(model),
        "context": str(_context(folder)),
        "tp": tp,
        "page": page,
        "meet": str(folder / f"meet-{name}"),
        "extra": {"broker": broker, "engine_id": name, "find_ms": 10_000, **(extra or {})},
        **more,
    }
    paths = [str(TESTS), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "RESTOW_SGLANG_PACKAGES": str(packages),
    }
    ranks = []
    with contextlib.ExitStack() as stack:
        for rank in range(tp):
            log = stack.enter_context((folder / f"{name}-{rank}.log").open("w"))
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "sglang_harness.rank_main"),
                    json.dumps(options | {"rank": rank}),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
            )
            stack.callback(_ended, process)
            ranks.append(process)
        yield SglangEngine(tuple(ranks))


def _ended(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


def _context(folder: Path) -> Path:
    """Write the config that SGLang's process-wide settings are made from; no test looks at it."""
    made = folder / "context"
    made.mkdir(exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "vocab_size": 64,
        "max_position_embeddings": 2048,
    }
    (made / "config.json").write_text(json.dumps(config))
    return made
