"""Copies that are plainly runs of one size are done without a table, and as the table says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from restow.agents.binding.pieces import Copies, EqualRuns, Grid
from restow.agents.copying import prepared_copies as preparing
from restow.agents.copying.prepared_copies import piece_table, prepared_copies
from restow.agents.errors import ProgramInvalidError
from restow.broker.layout import DType
from restow.broker.layout.dtype import ITEM_BYTES
from restow.broker.layout.rows import Int64s
from restow.kernels import Column, CopyCode, prepare_runs
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
    monkeypatch.setattr(preparing, "piece_table", _no_table)
    prepared_copies(copies, CPU)()
    (grid,) = copies.grids
    for src, dst in zip(grid.src_address.flat, grid.dst_address.flat, strict=True):
        begin, at = int(src) - source.data_ptr(), int(dst) - got.data_ptr()
        wanted[at : at + size_bytes] = source[begin : begin + size_bytes]
    assert torch.equal(got, wanted)


def _no_table(copies: Copies) -> None:
    raise AssertionError("a table was made")


DTYPES = st.sampled_from([DType.UINT8, DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32])


ODDITIES = range(9)


def one_grid(
    src_dtype: int, dst_dtype: int, rows: int, stretches: int, count: int, odd: int
) -> Grid:
    """Runs, if the types are equal and nothing is ``odd``."""
    items = (int(ITEM_BYTES[src_dtype]), int(ITEM_BYTES[dst_dtype]))

    def column(value: int, last: int) -> Int64s:
        values = np.full((rows, 1), value, np.int64)
        values[-1] = last
        return values

    shape = (rows, stretches)
    counts = np.full(shape, count, np.int64)
    counts[-1, -1] += odd == 0
    src, dst = (
        64 * (1 + np.arange(rows * stretches, dtype=np.int64).reshape(shape)) for _ in range(2)
    )
    src[0, 0] += odd == 1
    dst[-1, -1] *= odd != 2
    src[-1, 0] -= 1 << 40 if odd == 3 else 0
    steps = (
        column(items[0], items[0] * (1 + (odd == 4))),
        column(items[1], items[1] * (1 + (odd == 5))),
    )
    kinds = (
        column(src_dtype, DType.FLOAT16 if odd == 6 else src_dtype),
        column(dst_dtype, DType.FLOAT16 if odd == 7 else dst_dtype),
    )
    return Grid(src, dst[:1] if odd == 8 else dst, counts, *steps, *kinds)


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    """Mostly runs, mostly equal ones, seldom odd."""
    src_dtype = draw(DTYPES)
    dst_dtype = src_dtype if draw(st.integers(0, 4)) else draw(DTYPES)
    rows, stretches, eights = (draw(st.integers(least, 3)) for least in (1, 1, 0))
    odd = draw(st.integers(0, 2 * len(ODDITIES)))
    return one_grid(src_dtype, dst_dtype, rows, stretches, 8 * eights, odd)


@given(st.lists(grids(), max_size=3))
def test_equal_runs_are_what_the_table_says(found: list[Grid]) -> None:
    check_against_the_table(found)


@pytest.mark.parametrize("odd", ODDITIES)
def test_one_oddity_is_enough(odd: int) -> None:
    grid = one_grid(DType.BFLOAT16, DType.BFLOAT16, 2, 3, 32, odd)
    assert Copies((grid,)).equal_runs() is None
    check_against_the_table([grid])


def check_against_the_table(found: list[Grid]) -> None:
    copies = Copies(tuple(found))
    runs = copies.equal_runs()
    try:
        table = piece_table(copies).rows
    except ProgramInvalidError:
        assert runs is None
        return
    code = table[:, Column.CODE]
    sizes = table[:, Column.COUNT] * SRC_BYTES[code]
    steps = table[:, Column.SRC_STEP_BYTES : Column.CODE] == SRC_BYTES[code][:, None]
    plain = bool((code <= CopyCode.COPY_8).all() and steps.all() and len(set(sizes.tolist())) == 1)
    if runs is None:
        # Runs of elements of several types may be left to the table, and addresses that broadcast.
        types = {dtype for grid in found for dtype in grid.src_dtype.flat}
        broadcast = any(grid.src_address.shape != grid.dst_address.shape for grid in found)
        assert not plain or sizes[0] == 0 or len(types) > 1 or broadcast
        return
    assert plain
    assert np.array_equal(runs.src_address, table[:, Column.SRC_ADDRESS])
    assert np.array_equal(runs.dst_address, table[:, Column.DST_ADDRESS])
    assert runs.length_bytes == sizes[0]


def test_short_runs_are_left_to_a_table_where_they_may_join() -> None:
    memory = torch.zeros(1 << 13, dtype=torch.uint8)
    at = memory.data_ptr() + 32 * np.arange(64)
    assert prepare_runs(at, at + (1 << 12), 32) is None


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
