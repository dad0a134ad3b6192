"""Copy kernels against memcpy of the same bytes, in the same run.

    python bench/kernels.py [--json FILE] [--repeats N] [--threads N]

Every repeat times the copy, then the reference; the medians are compared. ratio is
reference seconds / seconds: 1.0 is as fast as one memcpy of all the bytes.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from restow.kernels import CopyCode, PieceTable, copy_pieces

TAPS, CHANNELS, PAGES = 3, 6144, 17
Call = Callable[[], object]


class Case:
    """A table between a pool and a staging run that lie on the device."""

    def __init__(self, name: str, device: torch.device, pool_bytes: int, staging_bytes: int):
        self.name, self.device = name, device
        self.pool = torch.ones(pool_bytes, dtype=torch.uint8, device=device)
        self.staging = torch.ones(staging_bytes, dtype=torch.uint8, device=device)

    def table(self, pool: np.ndarray, staging: np.ndarray, shape: tuple[int, ...]) -> PieceTable:
        """Rows from pool offsets to staging offsets; shape is COUNT, steps and CODE."""
        rows = np.empty((len(pool), 6), dtype=np.int64)
        rows[:, 0], rows[:, 1] = self.pool.data_ptr() + pool, self.staging.data_ptr() + staging
        rows[:, 2:] = shape
        return PieceTable.checked(rows)


def inverse(table: PieceTable) -> PieceTable:
    """Swap the roles of the two addresses."""
    return PieceTable.checked(table.rows[:, [1, 0, 2, 4, 3, 5]])


def cases(device: torch.device) -> list[tuple[str, Case, PieceTable]]:
    """Gathers and scatters of each kind of table."""
    rng = np.random.default_rng(0)
    found = []
    for label, n, length in (("a", 8192, 4096), ("a", 2048, 16384), ("b", 23, 512 * 1024)):
        name = f"{label}: {n} runs of {length // 1024} KiB"
        case = Case(name, device, 3 * n * length, n * length)
        page = rng.permutation(3 * n)[:n] * length
        shape = (length // 8, 8, 8, CopyCode.COPY_8)
        gather = case.table(page, np.arange(n) * length, shape)
        found += [("gather", case, gather), ("scatter", case, inverse(gather))]
        if label == "a":  # pages to pages, no side evenly spaced
            other = Case(case.name, device, 3 * n * length, 3 * n * length)
            there = rng.permutation(3 * n)[:n] * length
            found.append(("page to page", other, other.table(page, there, shape)))
    page_bytes = TAPS * CHANNELS * 2
    case = Case(f"c: {PAGES * CHANNELS} conv channels of 3 taps", device, 4 * PAGES * page_bytes,
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


def interleaved(calls: dict[str, Call], repeats: int, device: torch.device) -> dict[str, float]:
    """Median seconds of every call, taken in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(-2, repeats):  # two to warm up
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if repeat >= 0:
                seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in seconds.items()}


def measure(device: torch.device, repeats: int) -> list[dict[str, object]]:
    """Measure all cases on one device."""
    results: list[dict[str, object]] = []
    for kind, case, table in cases(device):
        n_bytes = table.bytes_written
        plain, target = case.pool[:n_bytes].clone(), torch.ones_like(case.staging[:n_bytes])
        on_host = device.type == "cpu"
        memcpy: Call = partial(target.copy_, plain)
        if on_host:
            memcpy = partial(np.copyto, target.numpy(), plain.numpy())
        calls: dict[str, Call] = {"copy": partial(copy_pieces, table, device), "memcpy": memcpy}
        median = interleaved(calls, repeats, device)
        results.append(
            {
                "suite": "kernels",
                "case": f"{'twin' if on_host else 'triton'}, {case.name}, {kind}",
                "bytes": n_bytes,
                "seconds": median["copy"],
                "reference": "memcpy of the same bytes",
                "reference_seconds": median["memcpy"],
                "ratio": median["memcpy"] / median["copy"],
            }
        )
    return results


def main() -> None:
    """Measure, print a table, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1, help="torch threads (1)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results = measure(torch.device("cpu"), options.repeats)
    if torch.cuda.is_available():
        results += measure(torch.device("cuda"), options.repeats)
    print(f"{'case':62} {'MiB':>6} {'ms':>8} {'GB/s':>7} {'memcpy':>7} {'ratio':>6}")
    for row in results:
        n_bytes, seconds = int(str(row["bytes"])), float(str(row["seconds"]))
        memcpy = n_bytes / float(str(row["reference_seconds"])) / 1e9
        print(
            f"{row['case']:62} {n_bytes / 2**20:6.1f} {seconds * 1e3:8.3f}"
            f" {n_bytes / seconds / 1e9:7.2f} {memcpy:7.2f} {row['ratio']:6.2f}"
        )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
