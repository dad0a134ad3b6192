"""What is measured is copied as states are: many pieces together, not one by one."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest

from restow.agents.lane import Read
from restow.agents.memory import HOST
from restow.agents.probing import LEAST_BYTES, measure_copying, measure_reading
from restow.agents.reader import Reader
from restow.kernels.host_memory import memmove_rows

STAGING_BYTES = 64 << 20


@pytest.mark.parametrize("size_bytes", [LEAST_BYTES, STAGING_BYTES])
async def test_costs_of_copying_are_positive_numbers(size_bytes: int) -> None:
    memory = np.zeros(size_bytes, np.uint8)
    costs = await measure_copying(memory.ctypes.data, size_bytes, HOST)
    assert costs.seconds_per_launch > 0
    assert costs.copy_bytes_per_second > 0
    assert min(costs.seconds_per_copy, costs.seconds_per_element) >= 0


class Slow:
    """A reader whose costs are known; now and then it takes longer for a while."""

    def __init__(self, piece_s: float, byte_s: float, rng: np.random.Generator) -> None:
        self.now_s = 0.0
        self._costs = piece_s, byte_s
        self._rng = rng
        self._busy_until_s = 0.0

    def clock(self) -> float:
        return self.now_s

    async def read(self, reads: Sequence[Read], deadline_s: float) -> None:
        pieces = reads[0].descriptors
        if self._rng.random() < 0.03:
            self._busy_until_s = self.now_s + 0.05
        slower = 3.0 if self.now_s < self._busy_until_s else 1.0
        piece_s, byte_s = self._costs
        taken_s = 1e-4 + piece_s * len(pieces.length_bytes) + byte_s * pieces.size_bytes
        self.now_s += slower * taken_s


@pytest.mark.parametrize(
    ("piece_s", "byte_s"), [(4e-6, 8e-10), (1e-6, 2e-10), (3e-6, 8e-9)], ids=["TCP", "CMA", "slow"]
)
async def test_what_else_the_machine_does_makes_pieces_no_cheaper(
    piece_s: float, byte_s: float
) -> None:
    for seed in range(50):
        slow = Slow(piece_s, byte_s, np.random.default_rng(seed))
        reader = cast(Reader, slow)
        size_bytes = 32 << 20
        found = await measure_reading(
            reader, "P", 1 << 30, 1 << 40, size_bytes, (HOST, HOST), 2.0, clock=slow.clock
        )
        assert found.seconds_per_descriptor == pytest.approx(piece_s, rel=0.25)
        assert found.read_bytes_per_second == pytest.approx(1 / byte_s, rel=0.25)
        assert slow.now_s < 2.0


async def test_pieces_are_as_many_as_go_the_way_of_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows are moved by a call each, which costs many times what a row of many does."""
    called: list[int] = []

    def counted(src: Any, dst: Any, length_bytes: Any) -> None:
        called.append(len(src))
        memmove_rows(src, dst, length_bytes)

    monkeypatch.setattr("restow.kernels.naive.memmove_rows", counted)
    memory = (ctypes.c_char * STAGING_BYTES)()
    await measure_copying(ctypes.addressof(memory), STAGING_BYTES, HOST)
    assert called
    assert max(called) == 1
