"""vLLM's own scheduler and cache: what is told of it is there, and what is pinned stays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm_harness.lived import GROUPS, live

pytestmark = pytest.mark.timeout(600)
PROGRAM = "cache_histories.py"


def test_what_is_told_is_held_and_what_is_pinned_stays_as_it_is(vllm_python: Path) -> None:
    """Play random requests, replies, aborts, evictions and resets, for every kind of group."""
    seen: dict[str, int] = json.loads(live(vllm_python, PROGRAM, GROUPS, 6))
    for what in ("resets", "declined"):
        assert seen[what] > 3, seen
    for what in ("comparisons", "pins", "others", "blocks in runs"):
        assert seen[what] > 500, seen


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("removals", "self.told == truth"),
        ("resets", "self.told == truth"),
        ("running states", "cells[block][0] == names[-1]"),
        ("references", "ref_cnt == 0"),
    ],
)
def test_the_law_bites(vllm_python: Path, fault: str, found: str) -> None:
    assert found in live(vllm_python, PROGRAM, ("states inside of blocks",), 6, fault)
