"""Measure in staging what copying on this host costs, and what reading from a peer costs.

The result is the lower quartile of several repetitions: other load on the machine hardly affects
it, and neither does luck, as it would affect the minimum. Repetitions alternate and use different
parts of the memory, because states are not in any cache either. Only one thread reads: the gain of
more threads depends on idle cores.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import time
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Generic, TypeVar

import numpy as np

from restow.agents.binding.copies import Copies, Grid
from restow.agents.binding.reads import Descriptors
from restow.agents.copying.copier import run_copies
from restow.agents.memory.errors import StagingExhaustedError
from restow.agents.memory.regions import HOST, MemoryPlace, address_of
from restow.agents.reading.lane import Read
from restow.agents.reading.reader import Reader
from restow.broker.layout import DType
from restow.broker.layout.rows import Int64s
from restow.broker.planner import CopyCosts, ReadCosts

Costs = TypeVar("Costs")
LEAST_BYTES = 1 << 20
USUAL = 0.25
"""The quantile that is reported."""
COPY_ROUNDS = 30
COPY_TURNS = 8
"""Places of host memory that take turns, so that the next place is in no cache."""
LEAST_READ_ROUNDS = 4
MOST_READ_ROUNDS = 24
READING_S = 0.5
"""No more rounds begin after this time, once `LEAST_READ_ROUNDS` were made."""
READ_PIECE_BYTES = 4096
MOST_READ_PIECES = 3072
COPY_PIECE_BYTES = (1024, 8192)
"""The automatic choice of a strategy depends on sizes between these."""
MOST_COPY_PIECES = (4096, 512)
"""Most pieces of each size; many, as in a state, because a host copies few pieces differently."""
MOST_PIECES_ON_DEVICE = (4096, 4096)
"""Most pieces of each size on a device, which copies them in one place.

The few megabytes of a host's turn would take a device no time beside the launch, and make it seem
as slow as a host.
"""
ROWS = 48
"""Strided rows, each as long as a conv window's."""
ROW_ELEMENTS = 2048
KNOWN_S = 600.0
"""How long costs are given again without another measurement."""
ALIGNED_BYTES = 64
_TINY_BYTES = 64
_WIDE = DType.BFLOAT16


class KnownCosts(Generic[Costs]):
    """Measured costs by peer or size. Another broker that begins to lead is answered at once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin without costs."""
        self._clock = clock
        self._known: dict[object, tuple[float, Costs]] = {}

    def get(self, key: object) -> Costs | None:
        """Return the costs that were measured within `KNOWN_S`; None: there are none."""
        until_s, costs = self._known.get(key, (0.0, None))
        return costs if self._clock() < until_s else None

    def keep(self, key: object, costs: Costs) -> Costs:
        """Keep costs that were measured now; return them."""
        now_s = self._clock()
        self._known = {name: known for name, known in self._known.items() if now_s < known[0]}
        self._known[key] = now_s + KNOWN_S, costs
        return costs


def check_room(size_bytes: int) -> None:
    """Raise `StagingExhaustedError` if there is less staging than a measurement needs."""
    if size_bytes < LEAST_BYTES:
        raise StagingExhaustedError(
            f"{size_bytes} bytes of staging are too few for a measurement, which needs "
            f"{LEAST_BYTES} bytes: start the agent with more staging"
        )


async def measure_copying(
    address: int,
    size_bytes: int,
    place: MemoryPlace,
    clock: Callable[[], float] = time.perf_counter,
) -> CopyCosts:
    """Measure copies between the memory at ``address`` and memory like an engine's, both ways.

    On a host that is other memory, because staging may lie in huge pages, which copy faster.
    """
    room, other_address = size_bytes // 2, address + size_bytes // 2
    turns, most_pieces = (1, MOST_PIECES_ON_DEVICE)
    if place == HOST:
        turns, most_pieces = COPY_TURNS, MOST_COPY_PIECES
        pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE)
        room, other_address = size_bytes, address_of(pages)
        for begin in (address, other_address):
            ctypes.memset(begin, 1, room)  # so that all pages exist
    pieces = [
        _gathers_and_scatters(address, other_address, room, piece_bytes, turns, most)
        for piece_bytes, most in zip(COPY_PIECE_BYTES, most_pieces, strict=True)
    ]
    kinds = [
        list(_runs(address, other_address, room, _TINY_BYTES)),
        *chain.from_iterable(pieces),
        list(_strided(address, other_address, room)),
    ]
    rounds: list[list[float]] = []
    for index in range(1 + COPY_ROUNDS):
        taken_s = []
        for number, copies in enumerate(kinds):
            began_s = clock()
            run_copies(copies[(turns // 2 * index + number) % len(copies)], place.device)
            taken_s.append(clock() - began_s)
            await asyncio.sleep(0)
        if index:  # the first round warms up
            rounds.append(taken_s)
    launch_s, *pieces_s, rows_s = np.quantile(rounds, USUAL, axis=0).tolist()
    short_s, long_s = (
        max(taken - launch_s, taken / 2) / len(both[0][0])
        for taken, both in zip(np.reshape(pieces_s, (-1, 2)).mean(axis=1), pieces, strict=True)
    )
    short, long = COPY_PIECE_BYTES
    # On a busy machine a short copy may take as long as a long copy.
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
    """Measure reads of the peer's memory, in one piece and in many. Raises as `Reader.read`.

    ``places`` are those of the peer's memory and of the own memory. The pieces are as many as a
    state has: over TCP a few pieces arrive while others are still requested, and seem cheap.
    """
    rng = np.random.default_rng(0)
    room = size_bytes // READ_PIECE_BYTES
    count = min(room // 2, MOST_READ_PIECES)
    short_bytes, long_bytes = count * READ_PIECE_BYTES // 3, count * READ_PIECE_BYTES
    each_bytes = np.full(count, READ_PIECE_BYTES, np.int64)

    def run(length_bytes: int) -> Descriptors:
        at = int(rng.integers(room - length_bytes // READ_PIECE_BYTES)) * READ_PIECE_BYTES
        return Descriptors.single(src_address + at, dst_address + at, length_bytes)

    def pieces() -> Descriptors:
        # No piece touches another, because adjacent pieces may be read as one.
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
        if index:  # the first round connects
            rounds.append(taken_s)
        if index >= LEAST_READ_ROUNDS and clock() > enough_s:
            break
    short_s, long_s, pieces_s = np.quantile(rounds, USUAL, axis=0).tolist()
    # The fixed cost of a read is in all three times and cancels out.
    longer_s = max(long_s - short_s, long_s / 4)
    extra_s = max(pieces_s - long_s, 0.0)
    return ReadCosts(extra_s / count, (long_bytes - short_bytes) / longer_s)


def _windows(size_bytes: int, length_bytes: int) -> Iterator[int]:
    """Yield offsets for the turns, different as far as there is room."""
    for index in range(COPY_TURNS):
        yield (
            index * length_bytes % (size_bytes - length_bytes + 1) // ALIGNED_BYTES * ALIGNED_BYTES
        )


def _runs(src_address: int, dst_address: int, size_bytes: int, length: int) -> Iterator[Copies]:
    for at in _windows(size_bytes, length):
        src, dst = np.array([src_address + at]), np.array([dst_address + at])
        yield _copies(src, dst, length, (1, 1), DType.UINT8)


def _strided(src_address: int, dst_address: int, size_bytes: int) -> Iterator[Copies]:
    """Yield copies of rows from a window by taps to a window by channels."""
    item = _WIDE.itemsize_bytes
    rows = item * np.arange(ROWS)
    for at in _windows(size_bytes, ROWS * ROW_ELEMENTS * item):
        src, dst = src_address + at + ROW_ELEMENTS * rows, dst_address + at + rows
        yield _copies(src, dst, ROW_ELEMENTS, (item, ROWS * item), _WIDE)


def _gathers_and_scatters(
    address: int, other_address: int, size_bytes: int, piece_bytes: int, turns: int, most: int
) -> tuple[list[Copies], list[Copies]]:
    """Return copies between scattered pieces at ``other_address`` and a run at ``address``."""
    count = min(size_bytes // piece_bytes // turns, most)
    order = np.random.default_rng(0).permutation(size_bytes // piece_bytes)
    gathers, scatters = [], []
    for at in range(0, turns * count, count):
        adjacent = address + piece_bytes * np.arange(at, at + count)
        apart = other_address + piece_bytes * order[at : at + count]
        gathers.append(_copies(apart, adjacent, piece_bytes, (1, 1), DType.UINT8))
        scatters.append(_copies(adjacent, apart, piece_bytes, (1, 1), DType.UINT8))
    return gathers, scatters


def _copies(
    src: Int64s, dst: Int64s, count: int, steps_bytes: tuple[int, int], dtype: DType
) -> Copies:
    """Return copies of equal rows."""
    counts, src_step, dst_step, number = (
        np.array(value, np.int64) for value in (count, *steps_bytes, int(dtype))
    )
    return Copies((Grid(src, dst, counts, src_step, dst_step, number, number),))
