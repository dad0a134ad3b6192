"""What every benchmark yields: rows of one shape, a table of them, and JSON."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Row:
    """A median, and how it compares.

    ``ratio`` is the reference's seconds over ours: higher is faster. ``bytes`` is 0 where no bytes
    are moved; ``goal`` is the ratio that the project wants. ``samples``: of how many the median is.
    """

    suite: str
    case: str
    bytes: int
    seconds: float
    reference: str
    reference_seconds: float
    ratio: float
    goal: float | None = None
    note: str = ""
    samples: int = 0


def compared(
    suite: str,
    case: str,
    seconds: Sequence[float],
    reference: str,
    reference_seconds: Sequence[float],
    *,
    size_bytes: int = 0,
    goal: float | None = None,
    note: str = "",
) -> Row:
    """A row of two samples taken in turn: medians, and the ratio of the medians."""
    ours, theirs = statistics.median(seconds), statistics.median(reference_seconds)
    ratio = theirs / ours
    return Row(suite, case, size_bytes, ours, reference, theirs, ratio, goal, note, len(seconds))


def machine() -> str:
    """The machine in words."""
    with Path("/proc/cpuinfo").open() as lines:
        names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    load = os.getloadavg()[0]
    gpus = "".join(f"{name}, " for name in _gpus())
    return (
        f"{gpus}{len(names)} x {names[0] if names else platform.machine()}, "
        f"Linux {platform.release()}, Python {platform.python_version()}, "
        f"load {load:.1f} at the start"
    )


def _gpus() -> Iterator[str]:
    """The names that NVIDIA's driver has for what it finds."""
    for told in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        for line in told.read_text().splitlines():
            if line.startswith("Model:"):
                yield line.removeprefix("Model:").strip()


def show(rows: Sequence[Row], console: Console) -> None:
    """Print the rows as one table."""
    table = Table()
    for name in ("suite", "case"):
        table.add_column(name, overflow="fold")
    for name in ("MB", "ms", "reference", "ms", "ratio", "goal"):
        table.add_column(name, justify="left" if name == "reference" else "right")
    for row in rows:
        missed = row.goal is not None and row.ratio < row.goal
        table.add_row(
            row.suite,
            row.case + (f" ({row.note})" if row.note else ""),
            f"{row.bytes / 1e6:.1f}" if row.bytes else "",
            f"{row.seconds * 1e3:.3f}",
            row.reference,
            f"{row.reference_seconds * 1e3:.3f}",
            f"[{'red' if missed else 'green' if row.goal else 'default'}]{row.ratio:.2f}",
            "" if row.goal is None else f"{row.goal:.2f}",
        )
    console.print(table)


def write_json(rows: Sequence[Row], path: Path, about: str) -> None:
    """Write all rows, with the day and the machine."""
    today = datetime.now(UTC).date().isoformat()
    measured = {"date": today, "machine": about, "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(measured, indent=1))


Yield = Callable[[Row], None]
"""Takes each row as it is measured, so that long runs show progress.

A later row of the same suite, case and reference takes the place of the earlier one.
"""
