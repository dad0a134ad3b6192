"""What is measured is copied and read as states are: many pieces together, anywhere in memory.

What else the machine does counts little, and luck neither.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest

from restow.agents.binding.copies import Copies
from restow.agents.binding.reads import Descriptors
from restow.agents.memory.regions import HOST, MemoryKind, MemoryPlace
from restow.agents.probing.costs import (
    KNOWN_S,
    LEAST_BYTES,
    ROWS,
    KnownCosts,
    measure_copying,
    measure_reading,
)
from restow.agents.reading.lane import Read
from restow.agents.reading.reader import Reader
from restow.broker.planner import ReadCosts
from restow.kernels.host_copies import memmove_rows

STAGING_BYTES = 64 << 20
SRC, DST = 1 << 30, 1 << 40
PAGE_BYTES = 4096


@pytest.mark.parametrize("size_bytes", [LEAST_BYTES, STAGING_BYTES])
async def test_costs_of_copying_are_positive_numbers(size_bytes: int) -> None:
    memory = np.zeros(size_bytes, np.uint8)
    costs = await measure_copying(memory.ctypes.data, size_bytes, HOST)
    assert costs.seconds_per_launch > 0
    assert costs.copy_bytes_per_second > 0
    assert min(costs.seconds_per_copy, costs.seconds_per_element) >= 0


class Machine:
    """A machine whose costs are known; it has a time of its own, and now and then other work.

    That takes ``busy_s``. ``lucky``: how often something takes half of what it usually does.
    ``launch_s``: what everything takes, however small.
    """

    def __init__(
        self,
        piece_s: float,
        byte_s: float,
        seed: int,
        busy_s: float = 0.05,
        lucky: float = 0.0,
        launch_s: float = 1e-4,
    ) -> None:
        self.now_s = 0.0
        self.reads: list[Descriptors] = []
        self.copies: list[Copies] = []
        self._costs = launch_s, piece_s, byte_s
        self._busy_s, self._lucky = busy_s, lucky
        self._rng = np.random.default_rng(seed)
        self._busy_until_s = 0.0

    def clock(self) -> float:
        return self.now_s

    async def read(self, reads: Sequence[Read], deadline_s: float) -> None:
        assert reads[0].alone
        pieces = reads[0].descriptors
        self.reads.append(pieces)
        self._pass(len(pieces.length_bytes), pieces.size_bytes)

    def copy(self, copies: Copies, device: str) -> None:
        self.copies.append(copies)
        self._pass(len(copies), copies.size_bytes)

    def _pass(self, pieces: int, size_bytes: int) -> None:
        if self._rng.random() < 0.03:
            self._busy_until_s = self.now_s + self._busy_s
        slower = 3.0 if self.now_s < self._busy_until_s else 1.0
        if self._rng.random() < self._lucky:
            slower /= 2
        launch_s, piece_s, byte_s = self._costs
        self.now_s += slower * (launch_s + piece_s * pieces + byte_s * size_bytes)


async def read_costs(machine: Machine, size_bytes: int = 32 << 20) -> ReadCosts:
    places = (HOST, HOST)
    reader = cast(Reader, machine)
    return await measure_reading(
        reader, "P", SRC, DST, size_bytes, places, 2.0, clock=machine.clock
    )


@pytest.mark.parametrize(
    ("piece_s", "byte_s"), [(4e-6, 8e-10), (1e-6, 2e-10), (3e-6, 8e-9)], ids=["TCP", "CMA", "slow"]
)
async def test_what_else_the_machine_does_makes_pieces_no_cheaper(
    piece_s: float, byte_s: float
) -> None:
    for seed in range(50):
        machine = Machine(piece_s, byte_s, seed)
        found = await read_costs(machine)
        assert found.seconds_per_descriptor == pytest.approx(piece_s, rel=0.25)
        assert found.read_bytes_per_second == pytest.approx(1 / byte_s, rel=0.25)
        assert machine.now_s < 2.0


async def test_a_lucky_read_makes_pieces_no_cheaper_and_no_dearer() -> None:
    for seed in range(50):
        found = await read_costs(Machine(4e-6, 8e-10, seed, busy_s=0.0, lucky=0.03))
        assert found.seconds_per_descriptor == pytest.approx(4e-6, rel=0.1)
        assert found.read_bytes_per_second == pytest.approx(1 / 8e-10, rel=0.1)


@pytest.mark.parametrize("size_bytes", [LEAST_BYTES, 32 << 20])
async def test_no_piece_lies_where_caches_would_have_it(size_bytes: int) -> None:
    # A piece that is read again from its place, or after its neighbour, costs less than in a state.
    machine = Machine(1e-6, 2e-10, 0)
    await read_costs(machine, size_bytes)
    many = [read for read in machine.reads if len(read.length_bytes) > 1]
    for address, base in (("src_address", SRC), ("dst_address", DST)):
        offsets = [getattr(read, address) - base for read in many]
        for read, offset in zip(many, offsets, strict=True):
            assert offset.min() >= 0
            assert (offset + read.length_bytes).max() <= size_bytes
            in_order = np.argsort(offset)
            ends = (offset + read.length_bytes)[in_order]
            assert (offset[in_order][1:] > ends[:-1]).all()  # or they are read as one
            assert 0.4 < np.mean(np.diff(offset) > 0) < 0.6  # in no order
        assert len({offset.tobytes() for offset in offsets}) == len(offsets)


async def test_as_many_pieces_are_read_as_a_state_has() -> None:
    # Over TCP a few megabytes arrive while pieces are still being asked for.
    machine = Machine(1e-6, 2e-10, 0)
    await read_costs(machine)
    assert max(len(read.length_bytes) for read in machine.reads) >= 3000


async def test_what_else_the_machine_does_makes_copies_no_cheaper(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for seed in range(50):
        machine = Machine(2e-7, 2e-10, seed, busy_s=0.01, lucky=0.02)
        monkeypatch.setattr("restow.agents.probing.costs.run_copies", machine.copy)
        memory = np.empty(0, np.uint8)
        monkeypatch.setattr("restow.agents.probing.costs.ctypes.memset", lambda *_: None)
        found = await measure_copying(memory.ctypes.data, 32 << 20, HOST, clock=machine.clock)
        assert found.seconds_per_launch == pytest.approx(1e-4, rel=0.3)
        assert found.seconds_per_copy == pytest.approx(2e-7, rel=0.3)
        assert found.copy_bytes_per_second == pytest.approx(5e9, rel=0.3)


async def test_a_device_does_not_seem_as_slow_as_its_launches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # An H200 takes 0.8 ms for a launch, 0.12 us for a piece, and a second for 400 GB.
    device = MemoryPlace(MemoryKind.CUDA)
    for seed in range(20):
        machine = Machine(1.2e-7, 2.5e-12, seed, busy_s=1e-3, launch_s=8e-4)
        monkeypatch.setattr("restow.agents.probing.costs.run_copies", machine.copy)
        found = await measure_copying(0, 32 << 20, device, clock=machine.clock)
        assert found.seconds_per_copy == pytest.approx(1.2e-7, rel=0.6)
        assert found.copy_bytes_per_second > 5e10


async def test_pieces_are_as_many_as_go_the_way_of_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    # A few rows are moved by a call each, which costs many times what a row of many rows does.
    called: list[int] = []

    def counted(src: Any, dst: Any, length_bytes: Any) -> None:
        called.append(len(src))
        memmove_rows(src, dst, length_bytes)

    monkeypatch.setattr("restow.kernels.host_copies.memmove_rows", counted)
    memory = (ctypes.c_char * STAGING_BYTES)()
    await measure_copying(ctypes.addressof(memory), STAGING_BYTES, HOST)
    assert called
    assert max(called) == 1


async def test_pieces_are_copied_both_ways_and_are_in_no_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A state is gathered at one side and scattered at the other, and no cache holds it there.
    machine, memory = Machine(2e-7, 2e-10, 0), np.zeros(STAGING_BYTES, np.uint8)
    monkeypatch.setattr("restow.agents.probing.costs.run_copies", machine.copy)
    await measure_copying(memory.ctypes.data, len(memory), HOST, clock=machine.clock)
    grids = [grid for copies in machine.copies for grid in copies.grids]
    touched_bytes, last, ways = 0, dict[int, int](), set[bool]()
    for grid in (grid for grid in grids if len(grid.src_address) > ROWS):
        ours = [
            pages
            for address in (grid.src_address, grid.dst_address)
            for pages in [(address - memory.ctypes.data) // PAGE_BYTES]
            if 0 <= pages.min() <= pages.max() < len(memory) // PAGE_BYTES
        ]
        assert len(ours) == 1  # the other side is not staging
        for page in np.unique(ours[0]).tolist():
            assert touched_bytes - last.get(page, -len(memory)) >= len(memory) // 2
            last[page] = touched_bytes
        touched_bytes += 2 * grid.size_bytes
        ways.add(bool(ours[0][0] == (grid.src_address[0] - memory.ctypes.data) // PAGE_BYTES))
    assert ways == {False, True}


def test_costs_are_known_for_some_time_and_each_by_itself() -> None:
    now_s = [100.0]
    costs = KnownCosts[str](lambda: now_s[0])
    assert costs.get("p") is None
    assert costs.keep("p", "slow") == "slow"
    now_s[0] += KNOWN_S - 1.0
    costs.keep("q", "fast")
    assert (costs.get("p"), costs.get("q")) == ("slow", "fast")
    now_s[0] += 1.0
    assert (costs.get("p"), costs.get("q")) == (None, "fast")
