"""Measure what copying costs on this host, and what reading from a peer does, in staging.

The least of a few repetitions, so that what else the machine does counts little; each in another
part of the memory, as states are not in any cache either. Reads are kept below what would be shared
out over threads: what a handoff gains by that depends on idle cores.
"""

from __future__ import annotations

import asyncio
import ctypes
import time
from collections.abc import Callable, Iterator

import numpy as np

from restow.agents.copying import run_copies
from restow.agents.errors import StagingExhaustedError
from restow.agents.lane import Read
from restow.agents.memory import HOST, Place
from restow.agents.pieces import Copies, Descriptors, Grid
from restow.agents.reader import Reader
from restow.broker.layout import DType
from restow.broker.layout.rows import Int64s
from restow.broker.planner import CopyCosts, ReadCosts

LEAST_BYTES = 1 << 20
REPEATS = 5
READ_ROUNDS = 24
READING_S = 0.25
"""After which no more rounds are begun, if there were a few."""
READ_PIECE_BYTES = 4096
MOST_READ_PIECES = 1024
COPY_PIECE_BYTES = (1024, 8192)
"""Between them lies what an auto choice hangs on; long runs are copied faster than pieces."""
MOST_COPY_PIECES = (4096, 512)
"""Many, as in a state: a host copies few pieces in another way."""
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


async def measure_copying(address: int, size_bytes: int, place: Place) -> CopyCosts:
    """Copy from one half of the memory at ``address`` to the other, in short turns."""
    if place == HOST:
        ctypes.memset(address, 1, size_bytes)  # no page is missing any more
    half = size_bytes // 2
    there = address + half

    async def seconds(turns: Iterator[Copies]) -> float:
        found = []
        for copies in turns:
            began_s = time.perf_counter()
            run_copies(copies, place.device)
            found.append(time.perf_counter() - began_s)
            await asyncio.sleep(0)
        return min(found[1:])  # the first one warms up

    launch_s = await seconds(_runs(address, there, half, _TINY_BYTES))
    each_s = []
    for piece_bytes, most in zip(COPY_PIECE_BYTES, MOST_COPY_PIECES, strict=True):
        turns = list(_pieces(half, piece_bytes, most))
        pieces_s = await seconds(
            _copies(address + src, there + dst, piece_bytes, (1, 1), DType.UINT8)
            for src, dst in turns
        )
        each_s.append(max(pieces_s - launch_s, pieces_s / 2) / len(turns[0][0]))
    (short_s, long_s), (short, long) = each_s, COPY_PIECE_BYTES
    # On a busy machine a short copy may take as long as a long one.
    second_per_byte = max(long_s - short_s, long_s / 2) / (long - short)
    rows_s = await seconds(_strided(address, there, half))
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
    places: tuple[Place, Place],
    deadline_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> ReadCosts:
    """Read what the peer holds, in one piece and in many. Raises as `Reader.read`.

    ``places`` are those of the peer's memory and of the own one. In turns, so that what else the
    machine does for a while slows none alone: a long run that seems slow makes pieces seem cheap.
    """

    def runs(length: int) -> Iterator[Descriptors]:
        for at in _windows(size_bytes, length):
            yield Descriptors(*_one(src_address + at, dst_address + at, length))

    # What every read costs, however many bytes it has, is in both and cancels out.
    turns = list(_pieces(size_bytes, READ_PIECE_BYTES, MOST_READ_PIECES))
    count = len(turns[0][0])
    half = count * READ_PIECE_BYTES // 2
    lengths = np.full(count, READ_PIECE_BYTES, np.int64)
    pieces = [Descriptors(src_address + src, dst_address + dst, lengths) for src, dst in turns]
    kinds = list(runs(half)), list(runs(3 * half)), pieces
    least_s = np.full(3, np.inf)
    enough_s = clock() + READING_S
    for index in range(READ_ROUNDS):
        taken_s = np.empty(3)
        for kind, ways in enumerate(kinds):
            began_s = clock()
            await reader.read([Read(peer, ways[index % len(ways)], *places)], deadline_s)
            taken_s[kind] = clock() - began_s
        if index:  # the first one connects
            least_s = np.minimum(least_s, taken_s)
        if index > REPEATS // 2 and clock() > enough_s:
            break
    short_s, long_s, pieces_s = least_s.tolist()
    second_per_byte = max(long_s - short_s, long_s / 4) / (2 * half)
    extra_s = pieces_s - short_s - half * second_per_byte
    return ReadCosts(max(extra_s, 0.0) / count, 1 / second_per_byte)


def _windows(size_bytes: int, length_bytes: int) -> Iterator[int]:
    """Where to begin: another place each time, as far as there are others."""
    for index in range(REPEATS + 1):
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


def _pieces(size_bytes: int, piece_bytes: int, most: int) -> Iterator[tuple[Int64s, Int64s]]:
    """Offsets of pieces that lie in no order on one side, and one after the other on the other."""
    count = min(size_bytes // piece_bytes // (REPEATS + 1), most)
    order = piece_bytes * np.random.default_rng(0).permutation(size_bytes // piece_bytes)
    for at in range(0, (REPEATS + 1) * count, count):
        yield order[at : at + count], piece_bytes * np.arange(at, at + count)


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
