"""Copies that are plainly runs of one size are done without a table, and as the table says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from restow.agents import copying
from restow.agents.copying import piece_table, prepared_copies
from restow.agents.errors import ProgramInvalidError
from restow.agents.pieces import Copies, EqualRuns, Grid
from restow.broker.layout import DType
from restow.broker.planner.table import ITEM_BYTES
from restow.kernels import Column
from restow.kernels.codes import SRC_BYTES

CPU = torch.device("cpu")
SIZES = (64, 96, 256, 1000, 1024, 4096, 300_000)


def pages(
    src_address: int, dst_address: int, size_bytes: int, rows: int, pages_each: int
) -> Copies:
    """Runs that lie apart, in another order on either side."""
    rng = np.random.default_rng(0)
    src, dst = (
        address + size_bytes * rng.permutation(rows * pages_each).reshape(rows, pages_each)
        for address in (src_address, dst_address)
    )
    item = ITEM_BYTES[DType.BFLOAT16]
    column = np.ones((rows, 1), np.int64)
    count = np.full((rows, pages_each), size_bytes // item)
    kind = column * int(DType.BFLOAT16)
    return Copies((Grid(src, dst, count, column * item, column * item, kind, kind),))


@pytest.mark.parametrize("size_bytes", SIZES)
@pytest.mark.parametrize("pages_each", [1, 70])
def test_pages_of_one_size_need_no_table(
    size_bytes: int, pages_each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = 3
    source = torch.randint(0, 256, (rows * pages_each * size_bytes,), dtype=torch.uint8)
    wanted = torch.full((source.numel() + 128,), 0xA5, dtype=torch.uint8)
    got = wanted.clone()
    copies = pages(source.data_ptr(), got.data_ptr() + 64, size_bytes, rows, pages_each)
    monkeypatch.setattr(copying, "piece_table", _no_table)
    prepared_copies(copies, CPU)()
    (grid,) = copies.grids
    for src, dst in zip(grid.src_address.flat, grid.dst_address.flat, strict=True):
        begin, at = int(src) - source.data_ptr(), int(dst) - got.data_ptr()
        wanted[at : at + size_bytes] = source[begin : begin + size_bytes]
    assert torch.equal(got, wanted)


def _no_table(copies: Copies) -> None:
    raise AssertionError("a table was made")


DTYPES = st.sampled_from([DType.UINT8, DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32])


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    """Mostly runs, mostly equal ones, seldom crooked."""
    rows, stretches = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    src_dtype = draw(DTYPES)
    dst_dtype = src_dtype if draw(st.integers(0, 4)) else draw(DTYPES)
    items = (int(ITEM_BYTES[src_dtype]), int(ITEM_BYTES[dst_dtype]))
    odd = draw(st.integers(0, 9))

    def column(value: int, other: int) -> np.ndarray:
        values = np.full((rows, 1), value, np.int64)
        values[-1] = other
        return values

    shape = (rows, stretches)
    count = np.full(shape, draw(st.integers(0, 3)) * 8, np.int64)
    count[-1, -1] += odd == 0
    src, dst = (
        64 * (1 + np.arange(rows * stretches, dtype=np.int64).reshape(shape)) for _ in range(2)
    )
    src[0, 0] += odd == 1
    dst[-1, -1] *= odd != 2
    src[-1, 0] -= 1 << 40 if odd == 3 else 0
    steps = (column(items[0], items[0] * (1 + (odd == 4))), column(items[1], items[1]))
    kinds = (
        column(src_dtype, src_dtype),
        column(dst_dtype, DType.FLOAT32 if odd == 5 else dst_dtype),
    )
    return Grid(src, dst, count, *steps, *kinds)


@given(st.lists(grids(), max_size=3))
def test_equal_runs_are_what_the_table_says(found: list[Grid]) -> None:
    copies = Copies(tuple(found))
    runs = copies.equal_runs()
    try:
        table = piece_table(copies).rows
    except (ProgramInvalidError, IndexError):
        assert runs is None
        return
    sizes = table[:, Column.COUNT] * SRC_BYTES[table[:, Column.CODE]]
    plain = len(table) > 0 and bool((table[:, Column.CODE] < 4).all())
    plain = plain and len(set(sizes.tolist())) == 1 and sizes[0] > 0
    for step in (Column.SRC_STEP_BYTES, Column.DST_STEP_BYTES):
        plain = plain and bool((table[:, step] == SRC_BYTES[table[:, Column.CODE]]).all())
    if runs is None:
        # Runs of elements of several sizes may be left to the table.
        assert not plain or len({int(grid.src_dtype.flat[0]) for grid in found}) > 1
        return
    assert plain
    assert np.array_equal(runs.src_address, table[:, Column.SRC_ADDRESS])
    assert np.array_equal(runs.dst_address, table[:, Column.DST_ADDRESS])
    assert runs.length_bytes == sizes[0]


@pytest.mark.parametrize("address", ["src_address", "dst_address"])
@pytest.mark.parametrize("crooked", [1, -(1 << 62)])
def test_crooked_pages_are_refused_as_ever(address: str, crooked: int) -> None:
    memory = torch.zeros(1 << 16, dtype=torch.uint8)
    copies = pages(memory.data_ptr(), memory.data_ptr() + (1 << 15), 256, 2, 40)
    assert isinstance(copies.equal_runs(), EqualRuns)
    (grid,) = copies.grids
    moved = getattr(grid, address).copy()
    moved[-1, -1] += crooked
    copies = Copies((replace(grid, **{address: moved}),))
    assert copies.equal_runs() is None
    with pytest.raises(ProgramInvalidError):
        prepared_copies(copies, CPU)
