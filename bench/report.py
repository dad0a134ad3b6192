"""Rows of one shape for every benchmark, a table of them in the terminal, and a JSON file."""

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
    """A median beside a reference that was measured in the same run.

    ``ratio`` is the reference over ours: above 1.0 Restow is faster, or takes less. ``value`` and
    ``reference_value`` are in ``unit``: "s", "MiB", "GB" or "tokens"; an empty unit means that only
    the ratio was measured. ``bytes`` is 0 if no bytes are moved, ``goal`` is the ratio that the
    project wants, and ``samples`` counts the measurements of ``value``.
    """

    suite: str
    case: str
    bytes: int
    value: float
    reference: str
    reference_value: float
    ratio: float
    goal: float | None = None
    note: str = ""
    samples: int = 0
    unit: str = "s"


Put = Callable[[Row], None]
"""Takes each row when it is measured, so that a long run shows its progress.

A later row replaces an earlier row of the same suite, case and reference.
"""


def compared(
    suite: str,
    case: str,
    values: Sequence[float],
    reference: str,
    reference_values: Sequence[float],
    *,
    size_bytes: int = 0,
    goal: float | None = None,
    note: str = "",
    unit: str = "s",
) -> Row:
    """Make a row of the medians of two lists of samples."""
    ours, theirs = statistics.median(values), statistics.median(reference_values)
    ratio = theirs / ours
    return Row(
        suite, case, size_bytes, ours, reference, theirs, ratio, goal, note, len(values), unit
    )


def amount(value: float, unit: str) -> str:
    """Format a value to three digits with its unit; seconds become us or ms where that is shorter.

    >>> amount(0.0000443, "s"), amount(0.0234, "s"), amount(28.21, "s"), amount(1.0, "")
    ('44.3 us', '23.4 ms', '28.2 s', '')
    """
    if not unit:
        return ""
    if unit == "s" and value < 1:
        value, unit = (value * 1e3, "ms") if value >= 0.001 else (value * 1e6, "us")
    digits = f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return f"{digits} {unit}"


def machine() -> str:
    """Describe this machine: GPUs, processors, versions and load."""
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
    """Yield the model of each GPU that NVIDIA's driver lists."""
    for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        for line in file.read_text().splitlines():
            if line.startswith("Model:"):
                yield line.removeprefix("Model:").strip()


def show(rows: Sequence[Row], console: Console) -> None:
    """Print all rows as one table; a ratio below its goal is red."""
    table = Table()
    for name in ("suite", "case"):
        table.add_column(name, overflow="fold")
    for name in ("MB", "median", "reference", "median", "ratio", "goal"):
        table.add_column(name, justify="left" if name == "reference" else "right")
    for row in rows:
        missed = row.goal is not None and row.ratio < row.goal
        table.add_row(
            row.suite,
            row.case + (f" ({row.note})" if row.note else ""),
            f"{row.bytes / 1e6:.1f}" if row.bytes else "",
            amount(row.value, row.unit),
            row.reference,
            amount(row.reference_value, row.unit),
            f"[{'red' if missed else 'green' if row.goal else 'default'}]{row.ratio:.2f}",
            "" if row.goal is None else f"{row.goal:.2f}",
        )
    console.print(table)


def write_json(rows: Sequence[Row], path: Path, about: str) -> None:
    """Write all rows with the date and the machine that ``about`` describes."""
    today = datetime.now(UTC).date().isoformat()
    measured = {"date": today, "machine": about, "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(measured, indent=1) + "\n")
