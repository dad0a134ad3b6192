"""What holds for all tests: Triton without a CUDA device, laws without a time limit."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import settings

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# How long an example may take is no law: on a busy machine every limit is passed at times.
usual = settings.get_profile(settings.get_current_profile_name())
settings.register_profile("restow", usual, deadline=None)
settings.load_profile("restow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep one in ``RESTOW_ONE_OF`` of each file's tests that are many of a kind."""
    one_of = int(os.environ.get("RESTOW_ONE_OF", "1"))
    before: Counter[Path] = Counter()
    left_out = set()
    for item in items:
        if item.get_closest_marker("matrix") or item.get_closest_marker("sampled"):
            if before[item.path] % one_of:
                left_out.add(id(item))
            before[item.path] += 1
    if left_out:
        gone = [item for item in items if id(item) in left_out]
        items[:] = [item for item in items if id(item) not in left_out]
        config.hook.pytest_deselected(items=gone)
