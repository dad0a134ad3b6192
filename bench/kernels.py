"""Copy kernels against one plain copy of as many bytes, in the same run.

    python bench/kernels.py [--json FILE] [--repeats N] [--threads N] [--vectors N] [--only-gpu]

On the host the twin against memcpy; on a CUDA machine also the Triton kernels against the device's
own copy rate and torch (torch >= 2.11, triton >= 3.6; where restow is not installed, PYTHONPATH
names broker, agents, kernels and proto). Every repeat times the copy, then the reference; medians
are compared. ratio is reference seconds / seconds: 1.0 is as fast as one copy of all the bytes.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from rows import machine

from restow.kernels import CopyCode, PieceTable, copy_pieces
from restow.kernels.launch_table import VECTORS

TAPS, CHANNELS, PAGES = 3, 6144, 17
Call = Callable[[], object]
Result = dict[str, object]


class Case:
    """A table between a pool and a staging run."""

    def __init__(self, name: str, pool_bytes: int, staging_bytes: int):
        self.name = name
        self.pool = torch.ones(pool_bytes, dtype=torch.uint8)
        self.staging = torch.ones(staging_bytes, dtype=torch.uint8)

    def table(self, pool: np.ndarray, staging: np.ndarray, shape: tuple[int, ...]) -> PieceTable:
        """Rows from pool offsets to staging offsets; shape is COUNT, steps and CODE."""
        rows = np.empty((len(pool), 6), dtype=np.int64)
        rows[:, 0], rows[:, 1] = self.pool.data_ptr() + pool, self.staging.data_ptr() + staging
        rows[:, 2:] = shape
        return PieceTable.checked(rows)


def inverse(table: PieceTable) -> PieceTable:
    """Swap the roles of the two addresses."""
    return PieceTable.checked(table.rows[:, [1, 0, 2, 4, 3, 5]])


def cases() -> list[tuple[str, Case, PieceTable]]:
    """Gathers and scatters of each kind of table."""
    rng = np.random.default_rng(0)
    found = []
    for label, n, length in (("a", 8192, 4096), ("a", 2048, 16384), ("b", 23, 512 * 1024)):
        name = f"{label}: {n} runs of {length // 1024} KiB"
        case = Case(name, 3 * n * length, n * length)
        page = rng.permutation(3 * n)[:n] * length
        shape = (length // 8, 8, 8, CopyCode.COPY_8)
        gather = case.table(page, np.arange(n) * length, shape)
        found += [("gather", case, gather), ("scatter", case, inverse(gather))]
        if label == "a":  # pages to pages, no side evenly spaced
            other = Case(case.name, 3 * n * length, 3 * n * length)
            there = rng.permutation(3 * n)[:n] * length
            found.append(("page to page", other, other.table(page, there, shape)))
    page_bytes = TAPS * CHANNELS * 2
    case = Case(f"c: {PAGES * CHANNELS} conv channels of 3 taps", 4 * PAGES * page_bytes,
                PAGES * page_bytes)  # fmt: skip
    page = rng.permutation(4 * PAGES)[:PAGES, None] * page_bytes
    channel = np.arange(CHANNELS)[None]
    gather = case.table(
        (page + 2 * channel).ravel(),
        np.arange(PAGES * CHANNELS) * TAPS * 2,
        (TAPS, 2 * CHANNELS, 2, CopyCode.COPY_2),
    )
    found += [("gather", case, gather), ("scatter", case, inverse(gather))]
    found.append(("gather, a row per tap", case, gather.lengthen()))
    shuffled = PieceTable.checked(rng.permutation(gather.rows))
    found.append(("gather, rows shuffled", case, shuffled))
    return found


def interleaved(calls: dict[str, Call], repeats: int) -> dict[str, float]:
    """Median seconds of every call, taken in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(-2, repeats):  # two to warm up
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            if repeat >= 0:
                seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in seconds.items()}


def measure(repeats: int) -> Iterator[Result]:
    """Measure the twin."""
    for kind, case, table in cases():
        n_bytes = table.bytes_written
        plain, target = case.pool[:n_bytes].clone(), torch.ones_like(case.staging[:n_bytes])
        median = interleaved(
            {
                "copy": partial(copy_pieces, table, torch.device("cpu")),
                "memcpy": partial(np.copyto, target.numpy(), plain.numpy()),
            },
            repeats,
        )
        yield {
            "suite": "kernels",
            "case": f"twin, {case.name}, {kind}",
            "bytes": n_bytes,
            "seconds": median["copy"],
            "reference": "memcpy of the same bytes",
            "reference_seconds": median["memcpy"],
            "ratio": median["memcpy"] / median["copy"],
        }


def show(row: Result) -> None:
    """One line."""
    n_bytes, seconds = int(str(row["bytes"])), float(str(row["seconds"]))
    reference = n_bytes / float(str(row["reference_seconds"])) / 1e9
    line = f"{row['case']:78} {n_bytes / 2**20:6.1f} {seconds * 1e3:8.3f}"
    line += f" {n_bytes / seconds / 1e9:8.2f} {reference:9.2f} {row['ratio']:6.2f}"
    for name, unit in (("with_a_fresh_table_seconds", 1e3), ("ratio_to_torch", 1)):
        if name in row:
            line += f" {float(str(row[name])) * unit:9.2f}"
    print(line, flush=True)


def main() -> None:
    """Measure, print a table, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1, help="torch threads (1)")
    parser.add_argument("--vectors", type=int, choices=VECTORS, help="size of tiles (by the table)")
    parser.add_argument("--only-gpu", action="store_true", help="leave the host out")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results: list[Result] = []
    print(f"{'case':78} {'MiB':>6} {'ms':>8} {'GB/s':>8} {'reference':>9} {'ratio':>6}"
          f" {'fresh, ms':>9} {'to torch':>9}")  # fmt: skip
    sources: list[Iterator[Result]] = [] if options.only_gpu else [measure(options.repeats)]
    if torch.cuda.is_available():
        from device_kernels import measure as measure_device

        print(f"GPU: {torch.cuda.get_device_name()}, torch {torch.__version__}")
        sources.append(measure_device(torch.device("cuda"), options.repeats, options.vectors))
    for row in chain.from_iterable(sources):
        results.append(row)
        show(row)
    if not torch.cuda.is_available():
        print("GPU: SKIPPED, there is none here; the Triton kernels were not measured")
    if options.json:
        today = datetime.now(UTC).date().isoformat()
        about = f"{machine()}, torch {torch.__version__}"
        measured = {"date": today, "machine": about, "rows": results}
        options.json.write_text(json.dumps(measured, indent=1) + "\n")


if __name__ == "__main__":
    main()
