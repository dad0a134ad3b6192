"""Measure what copying costs on this host, and what reading from a peer does, in staging.

The lower quartile of some repetitions, so that what else the machine does counts little, and luck
neither: the least of them is another one's each time. They are taken in turns and in other parts of
the memory, as states are not in any cache either. Only one thread reads: what a handoff gains by
more depends on idle cores, and a measurement must not teach how many there are.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import time
from collections.abc import Callable, Iterator
from itertools import chain

import numpy as np

from restow.agents.binding.copies import Copies, Grid
from restow.agents.binding.reads import Descriptors
from restow.agents.copying.piece_copies import run_copies
from restow.agents.memory.errors import StagingExhaustedError
from restow.agents.memory.regions import HOST, MemoryPlace, address_of
from restow.agents.reading.reader import Reader
from restow.agents.reading.transport import Read
from restow.broker.layout import DType
from restow.broker.layout.rows import Int64s
from restow.broker.planner import CopyCosts, ReadCosts

LEAST_BYTES = 1 << 20
USUAL = 0.25
"""The quantile that is taken."""
COPY_ROUNDS = 30
COPY_TURNS = 8
"""Places of host memory to copy from and to in turns: what is next must be in no cache."""
LEAST_READ_ROUNDS = 4
MOST_READ_ROUNDS = 24
READING_S = 0.5
"""After which no more rounds are begun, if there were a few."""
READ_PIECE_BYTES = 4096
MOST_READ_PIECES = 3072
COPY_PIECE_BYTES = (1024, 8192)
"""Between them lies what an auto choice hangs on; long runs are copied faster than pieces."""
MOST_COPY_PIECES = (4096, 512)
"""Many, as in a state: a host copies few pieces in another way."""
MOST_PIECES_ON_DEVICE = (4096, 4096)
"""More bytes, in one place: a device copies the few megabytes of a host's turn in no time beside
what the launch takes, and would seem as slow as a host."""
ROWS = 48
"""Strided rows, each of the length of a conv window's."""
ROW_ELEMENTS = 2048
ALIGNED_BYTES = 64
_TINY_BYTES = 64
_WIDE = DType.BFLOAT16


def check_room(size_bytes: int) -> None:
    """Raise `StagingExhaustedError` for less staging than a measurement needs."""
    if size_bytes < LEAST_BYTES:
        raise StagingExhaustedError(
            f"{size_bytes} bytes of staging are too few to measure with: {LEAST_BYTES} are needed"
        )


async def measure_copying(
    address: int,
    size_bytes: int,
    place: MemoryPlace,
    clock: Callable[[], float] = time.perf_counter,
) -> CopyCosts:
    """Copy between the memory at ``address`` and such as engines have, both ways, in short turns.

    On a host that is other memory: staging lies in huge pages, which are copied faster.
    """
    room, there = size_bytes // 2, address + size_bytes // 2
    turns, most_pieces = (1, MOST_PIECES_ON_DEVICE)
    if place == HOST:
        turns, most_pieces = COPY_TURNS, MOST_COPY_PIECES
        pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE)
        room, there = size_bytes, address_of(pages)
        for begin in (address, there):
            ctypes.memset(begin, 1, room)  # no page is missing any more
    pieces = [
        _gathers_and_scatters(address, there, room, piece_bytes, turns, most)
        for piece_bytes, most in zip(COPY_PIECE_BYTES, most_pieces, strict=True)
    ]
    kinds = [
        list(_runs(address, there, room, _TINY_BYTES)),
        *chain.from_iterable(pieces),
        list(_strided(address, there, room)),
    ]
    rounds: list[list[float]] = []
    for index in range(1 + COPY_ROUNDS):
        taken_s = []
        for number, copies in enumerate(kinds):
            began_s = clock()
            run_copies(copies[(turns // 2 * index + number) % len(copies)], place.device)
            taken_s.append(clock() - began_s)
            await asyncio.sleep(0)
        if index:  # the first one warms up
            rounds.append(taken_s)
    launch_s, *pieces_s, rows_s = np.quantile(rounds, USUAL, axis=0).tolist()
    short_s, long_s = (
        max(taken - launch_s, taken / 2) / len(both[0][0])
        for taken, both in zip(np.reshape(pieces_s, (-1, 2)).mean(axis=1), pieces, strict=True)
    )
    short, long = COPY_PIECE_BYTES
    # On a busy machine a short copy may take as long as a long one.
    second_per_byte = max(long_s - short_s, long_s / 2) / (long - short)
    elements = ROWS * ROW_ELEMENTS
    spread_s = rows_s - launch_s - elements * _WIDE.itemsize_bytes * second_per_byte
    piece_s = short_s - short * second_per_byte
    return CopyCosts(
        launch_s, max(piece_s, 0.0), max(spread_s / elements, 0.0), 1 / second_per_byte
    )


async def measure_reading(
    reader: Reader,
    peer: str,
    src_address: int,
    dst_address: int,
    size_bytes: int,
    places: tuple[MemoryPlace, MemoryPlace],
    deadline_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> ReadCosts:
    """Read what the peer holds, in one piece and in many. Raises as `Reader.read`.

    ``places`` are those of the peer's memory and of the own one. Many pieces, as a state has: over
    TCP few of them come while others are still being asked for, and seem cheap.
    """
    rng = np.random.default_rng(0)
    room = size_bytes // READ_PIECE_BYTES
    count = min(room // 2, MOST_READ_PIECES)
    short_bytes, long_bytes = count * READ_PIECE_BYTES // 3, count * READ_PIECE_BYTES
    each_bytes = np.full(count, READ_PIECE_BYTES, np.int64)

    def run(length_bytes: int) -> Descriptors:
        at = int(rng.integers(room - length_bytes // READ_PIECE_BYTES)) * READ_PIECE_BYTES
        return Descriptors(*_one(src_address + at, dst_address + at, length_bytes))

    def pieces() -> Descriptors:
        # None touches another: those that do may be read as one.
        src, dst = (2 * READ_PIECE_BYTES * rng.permutation(room // 2)[:count] for _ in range(2))
        return Descriptors(src_address + src, dst_address + dst, each_bytes)

    rounds: list[list[float]] = []
    enough_s = clock() + READING_S
    for index in range(1 + MOST_READ_ROUNDS):
        taken_s = []
        for descriptors in (run(short_bytes), run(long_bytes), pieces()):
            began_s = clock()
            await reader.read([Read(peer, descriptors, *places, alone=True)], deadline_s)
            taken_s.append(clock() - began_s)
        if index:  # the first one connects
            rounds.append(taken_s)
        if index >= LEAST_READ_ROUNDS and clock() > enough_s:
            break
    short_s, long_s, pieces_s = np.quantile(rounds, USUAL, axis=0).tolist()
    # What every read costs, however many bytes it has, is in all of them and cancels out.
    longer_s = max(long_s - short_s, long_s / 4)
    extra_s = max(pieces_s - long_s, 0.0)
    return ReadCosts(extra_s / count, (long_bytes - short_bytes) / longer_s)


def _windows(size_bytes: int, length_bytes: int) -> Iterator[int]:
    """Where to begin: another place each time, as far as there are others."""
    for index in range(COPY_TURNS):
        yield (
            index * length_bytes % (size_bytes - length_bytes + 1) // ALIGNED_BYTES * ALIGNED_BYTES
        )


def _runs(src_address: int, dst_address: int, size_bytes: int, length: int) -> Iterator[Copies]:
    for at in _windows(size_bytes, length):
        src, dst = _one(src_address + at, dst_address + at)
        yield _copies(src, dst, length, (1, 1), DType.UINT8)


def _strided(src_address: int, dst_address: int, size_bytes: int) -> Iterator[Copies]:
    """Rows of a window that lies tap by tap, to one that lies channel by channel."""
    item = _WIDE.itemsize_bytes
    rows = item * np.arange(ROWS)
    for at in _windows(size_bytes, ROWS * ROW_ELEMENTS * item):
        src, dst = src_address + at + ROW_ELEMENTS * rows, dst_address + at + rows
        yield _copies(src, dst, ROW_ELEMENTS, (item, ROWS * item), _WIDE)


def _gathers_and_scatters(
    address: int, there: int, size_bytes: int, piece_bytes: int, turns: int, most: int
) -> tuple[list[Copies], list[Copies]]:
    """Pieces that lie in no order ``there``, and one after the other at ``address``."""
    count = min(size_bytes // piece_bytes // turns, most)
    order = np.random.default_rng(0).permutation(size_bytes // piece_bytes)
    gathers, scatters = [], []
    for at in range(0, turns * count, count):
        here = address + piece_bytes * np.arange(at, at + count)
        apart = there + piece_bytes * order[at : at + count]
        gathers.append(_copies(apart, here, piece_bytes, (1, 1), DType.UINT8))
        scatters.append(_copies(here, apart, piece_bytes, (1, 1), DType.UINT8))
    return gathers, scatters


def _copies(
    src: Int64s, dst: Int64s, count: int, steps_bytes: tuple[int, int], dtype: DType
) -> Copies:
    """Rows that are all alike."""
    counts, src_step, dst_step, number = (
        np.array(value, np.int64) for value in (count, *steps_bytes, int(dtype))
    )
    return Copies((Grid(src, dst, counts, src_step, dst_step, number, number),))


def _one(*values: int) -> list[Int64s]:
    return [np.array([value], np.int64) for value in values]
