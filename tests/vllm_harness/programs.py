"""Runs programs of this folder by vLLM's Python, which say what vLLM itself makes of something."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from vllm_harness.engine import HERE, environment_of_vllm


def run_program(
    python: Path,
    program: str,
    *words: object,
    told: str | None = None,
    check: bool = True,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run a program with ``told`` on its standard input, and return what it printed."""
    more = {"VLLM_LOGGING_LEVEL": "CRITICAL", **environment}
    done = subprocess.run(
        [python, HERE / program, *map(str, words)],
        input=told,
        capture_output=True,
        text=True,
        env=environment_of_vllm(**more),
    )
    assert not check or not done.returncode, done.stderr[-3000:]
    return done


def answers(python: Path, program: str, *words: object, **more: Any) -> list[Any]:
    """Run a program, and return the lines that it printed which are JSON lists or objects."""
    lines = run_program(python, program, *words, **more).stdout.splitlines()
    return [json.loads(line) for line in lines if line.startswith(("[[", "[{", '["', "{"))]


def run_kernel(python: Path, program: str, vllm_path: str, folder: Path, *words: object) -> str:
    """Have a program take a kernel out of vLLM's source, and return what it printed.

    Triton's interpreter runs it here from its source alone, because vLLM for the CPU turns Triton
    off.
    """
    (source,) = python.parents[1].glob(f"lib/python3*/site-packages/vllm/{vllm_path}")
    done = subprocess.run(
        [sys.executable, HERE / program, source, folder / "kernel.py", *map(str, words)],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(HERE.parent)},
        capture_output=True,
        text=True,
    )
    assert not done.returncode, done.stderr[-3000:]
    return done.stdout.strip()
