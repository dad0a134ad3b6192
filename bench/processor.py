"""What processes have spent of the processors: steadier than time where they share few."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path


def spent_s(pids: Iterable[int]) -> float:
    """Seconds that all threads of some processes have run since they began."""
    total_ns = 0
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError):
                total_ns += int((task / "schedstat").read_text().split()[0])
    return total_ns / 1e9
