"""vLLM's own scheduler and cache: what is told of it is there, and what is pinned stays."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from vllm_harness.engine import ENVIRONMENT, HERE

pytestmark = pytest.mark.timeout(600)
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
    python: Path,
    groups: tuple[str, ...],
    histories: int,
    fault: str = "",
    program: str = "cache_histories.py",
) -> str:
    """Live through histories; return what was said at their end, or of the fault that was found."""
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


def test_what_is_told_is_held_and_what_is_pinned_stays_as_it_is(vllm_python: Path) -> None:
    """Random requests, replies, aborts, evictions and resets, for every kind of group."""
    seen: dict[str, int] = json.loads(live(vllm_python, GROUPS, 6))
    for what in ("resets", "declined"):
        assert seen[what] > 10, seen
    for what in ("comparisons", "pins", "others", "blocks in runs"):
        assert seen[what] > 500, seen


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("removals", "self.told == truth"),
        ("resets", "self.told == truth"),
        ("running states", "cells[block][0] == names[pin.tokens - 1]"),
        ("references", "ref_cnt == 0"),
    ],
)
def test_the_law_bites(vllm_python: Path, fault: str, found: str) -> None:
    assert found in live(vllm_python, ("states inside of blocks",), 6, fault)
