"""What holds for all tests: Triton without a CUDA device, laws without a time limit."""

from __future__ import annotations

import os
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
    """Leave out all but one of ``RESTOW_ONE_OF`` tests of the matrix."""
    one_of = int(os.environ.get("RESTOW_ONE_OF", "1"))
    matrix = [item for item in items if item.get_closest_marker("matrix")]
    left_out = {id(item) for index, item in enumerate(matrix) if index % one_of}
    if left_out:
        gone = [item for item in items if id(item) in left_out]
        items[:] = [item for item in items if id(item) not in left_out]
        config.hook.pytest_deselected(items=gone)
