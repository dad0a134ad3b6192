"""vLLM's own scheduler with the connector: what it takes of others, and what it gives them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm_harness.lived import GROUPS, live

pytestmark = pytest.mark.timeout(600)
PROGRAM = "prefix_histories.py"


def test_every_step_is_computed_from_its_own_tokens_and_nothing_stays_behind(
    vllm_python: Path,
) -> None:
    """Play offers, aborts, and loads that come, fail and are given up.

    There are histories for every kind of group and role.
    """
    seen: dict[str, int] = json.loads(live(vllm_python, PROGRAM, GROUPS, 6))
    for what in ("loads done", "loads failed", "published", "declined", "found", "not answered"):
        assert seen[what] > 50, seen
    for what in ("ends", "ends found", "ends checked", "kept"):
        assert seen[what] > 20, seen
    assert seen["among keys"] > 5, seen
    assert seen["begun with"] > 200, seen  # ends that vLLM has just given away look alike


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("failures", "read: "),
        ("marks", "read: full"),
        ("letting go", "blocks are left behind"),
        ("positions", "_check_published"),
        ("references", "ref_cnt"),
        ("reuse", "_check_published"),
        ("forgetting", "worth keeping, and not held"),
    ],
)
def test_the_law_bites(vllm_python: Path, fault: str, found: str) -> None:
    groups: tuple[str, ...] = ("states inside of blocks",)
    histories = 6
    if fault == "marks":  # a late write must meet a load, which threads decide
        groups, histories = ("attention", "windows"), 16
    assert found in live(vllm_python, PROGRAM, groups, histories, fault)
