"""Copies between any addresses of a device are made as the same copies on a host."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from restow.agents.binding.copies import Copies, Grid
from restow.agents.copying import device_copies
from restow.agents.copying.copier import run_copies
from restow.agents.copying.device_copies import run_grids
from restow.agents.memory.errors import ProgramInvalidError
from restow.broker.layout import DType
from restow.broker.layout.rows import Int64s
from restow.kernels import RowCall, RowTable, reference

CPU = torch.device("cpu")
SOURCE_BYTES, TARGET_BYTES, SLOT_BYTES = 4096, 16384, 256
CASTS = [(one, one) for one in (DType.UINT8, DType.BFLOAT16, DType.FLOAT32)]
CASTS += [(DType.FLOAT32, DType.BFLOAT16), (DType.BFLOAT16, DType.FLOAT32)]


class Rows:
    """Stands for rows on a device; what they copy is what the definition says."""

    def __init__(self, table: RowTable, device: torch.device) -> None:
        self.table = table

    def launch(self, call: RowCall, staged: int) -> None:
        reference.copy_rows(self.table, call, staged)


@pytest.fixture(autouse=True)
def defined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_copies, "device_rows", Rows)


def column(values: list[int]) -> Int64s:
    return np.array(values, np.int64)


@st.composite
def grids(draw: st.DrawFn) -> tuple[Grid, int]:
    """Draw rows of one grid, as offsets; the destination of each row is a slot of its own."""
    src_dtype, dst_dtype = draw(st.sampled_from(CASTS))
    items = src_dtype.itemsize_bytes, dst_dtype.itemsize_bytes
    rows = draw(st.integers(1, 12))
    align = draw(st.sampled_from((max(items), 16)))
    places = st.integers(0, SLOT_BYTES // align)
    src = [align * draw(places) for _ in range(rows)]
    dst = [SLOT_BYTES * row + align * draw(st.integers(0, 2)) for row in range(rows)]
    counts = st.integers(1, 9)
    same = draw(st.booleans())
    count = [draw(counts)] if same else draw(st.lists(counts, min_size=rows, max_size=rows))
    steps = [item * draw(st.sampled_from((1, 2, 3))) for item in items]
    grid = Grid(
        column(src), column(dst), column(count), column(steps[:1]), column(steps[1:]),
        column([int(src_dtype)]), column([int(dst_dtype)]),
    )  # fmt: skip
    return grid, rows


def moved(grid: Grid, source: int, target: int) -> Copies:
    values = [getattr(grid, name) for name in Grid.__slots__]
    values[0], values[1] = values[0] + source, values[1] + target
    return Copies((Grid(*values),))


@given(st.lists(grids(), min_size=1, max_size=3))
@settings(max_examples=150)
def test_rows_of_any_shape(drawn: list[tuple[Grid, int]]) -> None:
    source = np.random.default_rng(0).integers(0, 120, SOURCE_BYTES, dtype=np.uint8)
    targets = [np.full(TARGET_BYTES, 0xA5, np.uint8) for _ in range(2)]
    for run, target in ((run_copies, targets[0]), (run_grids, targets[1])):
        at = target.ctypes.data
        for grid, rows in drawn:
            run(moved(grid, source.ctypes.data, at), CPU)
            at += rows * SLOT_BYTES + SLOT_BYTES
    assert np.array_equal(targets[0], targets[1])


def test_addresses_that_are_too_far_apart_for_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_copies, "_WINDOW_PAGES", 3)
    source, target = np.arange(4096) % 251, np.zeros(5 * 16, np.uint8)
    source = source.astype(np.uint8)
    places = [16, 32, 512, 1024, 4064]
    kind, ones = column([int(DType.UINT8)]), column([1])
    grid = Grid(column(places), 16 * np.arange(5), column([16]), ones, ones, kind, kind)
    run_grids(moved(grid, source.ctypes.data, target.ctypes.data), CPU)
    want = [source[place : place + 16].tolist() for place in places]
    assert target.reshape(5, 16).tolist() == want


def test_elements_that_are_not_aligned_are_refused() -> None:
    memory = np.zeros(64, np.uint8)
    kind = column([int(DType.FLOAT32)])
    at = column([memory.ctypes.data + 2])
    grid = Grid(
        at, at + 30, column([2]), column([4]), column([4]), kind, column([int(DType.BFLOAT16)])
    )
    with pytest.raises(ProgramInvalidError):
        run_grids(Copies((grid,)), CPU)
