"""What is measured is copied as states are: many pieces together, not one by one."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from restow.agents.memory import HOST
from restow.agents.probing import LEAST_BYTES, measure_copying
from restow.kernels.host_memory import memmove_rows

STAGING_BYTES = 64 << 20


@pytest.mark.parametrize("size_bytes", [LEAST_BYTES, STAGING_BYTES])
async def test_costs_of_copying_are_positive_numbers(size_bytes: int) -> None:
    memory = np.zeros(size_bytes, np.uint8)
    costs = await measure_copying(memory.ctypes.data, size_bytes, HOST)
    assert costs.seconds_per_launch > 0
    assert costs.copy_bytes_per_second > 0
    assert min(costs.seconds_per_copy, costs.seconds_per_element) >= 0


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
