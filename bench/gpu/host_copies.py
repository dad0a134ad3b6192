"""The torch kernels that gather and scatter host memory, beside memcpy of the same bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from bench.report import Put, compared
from restow.kernels import CopyCode, PieceTable, copy_pieces

SUITE = "host-copies"
TAPS, CHANNELS, PAGES = 3, 6144, 17
WARM_UPS = 2
Call = Callable[[], object]


class Case:
    """A pool of pages and a staging run, with tables that copy between them."""

    def __init__(self, name: str, pool_bytes: int, staging_bytes: int) -> None:
        self.name = name
        self.pool = torch.ones(pool_bytes, dtype=torch.uint8)
        self.staging = torch.ones(staging_bytes, dtype=torch.uint8)

    def table(self, pool: np.ndarray, staging: np.ndarray, shape: tuple[int, ...]) -> PieceTable:
        """Make rows from pool offsets to staging offsets; ``shape`` is COUNT, steps and CODE."""
        rows = np.empty((len(pool), 6), dtype=np.int64)
        rows[:, 0], rows[:, 1] = self.pool.data_ptr() + pool, self.staging.data_ptr() + staging
        rows[:, 2:] = shape
        return PieceTable.checked(rows)


def inverse(table: PieceTable) -> PieceTable:
    """Swap the roles of the two addresses."""
    return PieceTable.checked(table.rows[:, [1, 0, 2, 4, 3, 5]])


def cases() -> Iterator[tuple[str, Case, PieceTable]]:
    """Yield gathers and scatters of pages, of long runs, and of transposed conv windows."""
    rng = np.random.default_rng(0)
    for count, length, is_page in (
        (8192, 4096, True),
        (2048, 16384, True),
        (23, 512 * 1024, False),
    ):
        name = f"{count} runs of {length // 1024} KiB"
        case = Case(name, 3 * count * length, count * length)
        page = rng.permutation(3 * count)[:count] * length
        shape = (length // 8, 8, 8, CopyCode.COPY_8)
        gather = case.table(page, np.arange(count) * length, shape)
        yield "gather", case, gather
        yield "scatter", case, inverse(gather)
        if is_page:  # pages to pages: neither side is evenly spaced
            pages = Case(case.name, 3 * count * length, 3 * count * length)
            other_page = rng.permutation(3 * count)[:count] * length
            yield "page to page", pages, pages.table(page, other_page, shape)
    page_bytes = TAPS * CHANNELS * 2
    name = f"{PAGES * CHANNELS} conv channels of {TAPS} taps"
    case = Case(name, 4 * PAGES * page_bytes, PAGES * page_bytes)
    page = rng.permutation(4 * PAGES)[:PAGES, None] * page_bytes
    gather = case.table(
        (page + 2 * np.arange(CHANNELS)[None]).ravel(),
        np.arange(PAGES * CHANNELS) * TAPS * 2,
        (TAPS, 2 * CHANNELS, 2, CopyCode.COPY_2),
    )
    yield "gather", case, gather
    yield "scatter", case, inverse(gather)
    yield "gather, a row per tap", case, gather.lengthen()
    yield "gather, rows shuffled", case, PieceTable.checked(rng.permutation(gather.rows))


def run(put: Put, repeats: int) -> None:
    """Measure every case with one thread of torch."""
    torch.set_num_threads(1)
    for kind, case, table in cases():
        size_bytes = table.bytes_written
        plain = case.pool[:size_bytes].clone().numpy()
        target = torch.ones_like(case.staging[:size_bytes]).numpy()
        ours, memcpy = _in_turns(
            partial(copy_pieces, table),
            partial(np.copyto, target, plain),
            repeats,
        )
        name = f"{case.name}, {kind}"
        put(compared(SUITE, name, ours, "memcpy of the same bytes", memcpy, size_bytes=size_bytes))


def _in_turns(ours: Call, reference: Call, repeats: int) -> tuple[list[float], list[float]]:
    """Return the seconds of both calls, made in turns."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for repeat in range(-WARM_UPS, repeats):
        for call, taken in zip((ours, reference), seconds, strict=True):
            begun_s = time.perf_counter()
            call()
            if repeat >= 0:
                taken.append(time.perf_counter() - begun_s)
    return seconds
