"""Runs programs of random histories by vLLM's Python."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from vllm_harness.engine import ENVIRONMENT, HERE

GROUPS = (
    "attention",
    "windows",
    "small windows",
    "states",
    "states inside of blocks",
    "large states",
    "all",
)


def live(
    python: Path, program: str, groups: tuple[str, ...], histories: int, fault: str = ""
) -> str:
    """Play histories; return what was printed at their end, or about the fault that was found."""
    environment = {**os.environ, **ENVIRONMENT, "VLLM_LOGGING_LEVEL": "CRITICAL"}
    environment.pop("PYTHONSAFEPATH", None)
    words = [",".join(groups), "1", str(histories), fault]
    told = subprocess.run(
        [python, HERE / program, *words],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert (told.returncode == 0) != bool(fault), told.stderr[-2000:]
    return told.stderr if fault else told.stdout.splitlines()[-1]
