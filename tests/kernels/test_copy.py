"""GATHER and SCATTER: the twin and the Triton kernel against the definition, byte for byte."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from kernel_arena import Arena, assert_copies, both, interpreted, rows_of_pieces, tables

from restow.kernels import CopyCode, PieceTable, copy, copy_pieces, reference
from restow.kernels import host_copies as copies
from restow.kernels.codes import DST_BYTES, SRC_BYTES

# The interpreter casts with numpy, which warns where float16 overflows to infinity.
pytestmark = [
    pytest.mark.sampled,
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]

CPU = torch.device("cpu")
CUDA = torch.cuda.is_available()
CopyPieces = Callable[[PieceTable], None]
CASTS = [code for code in CopyCode if code > CopyCode.COPY_8]


def triton_copy(table: PieceTable) -> None:
    """Run the kernel in Triton's interpreter, on host addresses.

    Short pieces are joined first, as a planner's rows are long.
    """
    rows, call = rows_of_pieces(table.lengthen())
    copy.DeviceRows(rows, CPU).launch(call, 0)


on_both = both(copies.copy_pieces, triton_copy)


def table_of(source: Arena, target: Arena, *pieces: tuple[int, ...]) -> PieceTable:
    """Return a table of rows whose two addresses are given as offsets."""
    rows = np.array(pieces, dtype=np.int64).reshape(-1, 6)
    rows[:, 0] += source.address
    rows[:, 1] += target.address
    return PieceTable.checked(rows)


@on_both
def test_an_empty_table_copies_nothing(run: CopyPieces) -> None:
    arena = Arena(64, seed=0)
    assert_copies(run, table_of(arena, arena), Arena(64))
    assert_copies(run, table_of(arena, arena, (0, 0, 0, 1, 1, 0)), arena)


@on_both
@pytest.mark.parametrize("count", [1, 63, 1000, 1024, 1025])
@pytest.mark.parametrize("code", list(CopyCode), ids=lambda code: code.name)
def test_odd_sizes(run: CopyPieces, code: CopyCode, count: int) -> None:
    src_unit, dst_unit = int(SRC_BYTES[code]), int(DST_BYTES[code])
    source, target = Arena(count * 64, seed=count), Arena(count * 32)
    dense = (0, 0, count, src_unit, dst_unit, code)
    strided = (8, 8 * count + 8, count, 3 * src_unit, 2 * dst_unit, code)
    assert_copies(run, table_of(source, target, dense, strided), target)


@on_both
@pytest.mark.parametrize("other", [CopyCode.COPY_4, CopyCode.F32_BF16])
def test_long_strided_rows_of_two_kinds(run: CopyPieces, other: CopyCode) -> None:
    source, target = Arena(8000, seed=2), Arena(8000)
    rows = (0, 0, 200, 6, 2, CopyCode.COPY_2), (2000, 400, 300, 12, 8, other)
    assert_copies(run, table_of(source, target, *rows), target)


@on_both
def test_wide_and_narrow_rows_share_one_launch(run: CopyPieces) -> None:
    source, target = Arena(1 << 16, seed=3), Arena(1 << 16)
    table = table_of(
        source,
        target,
        (0, 0, 5000, 8, 8, CopyCode.COPY_8),
        (40001, 40003, 7, 1, 1, CopyCode.COPY_1),
        (42000, 42000, 3, 2000, 2, CopyCode.COPY_2),
        (50000, 50000, 1500, 4, 2, CopyCode.F32_BF16),
        (60000, 60000, 33, 12, 8, CopyCode.COPY_4),
        (4, 62000, 0, 1, 1, CopyCode.COPY_1),
    )
    assert_copies(run, table, target)


@on_both
@pytest.mark.parametrize("channels", [63, 1000])
def test_conv_states_are_transposed_and_back(run: CopyPieces, channels: int) -> None:
    taps, pages = 3, [4, 0, 2]
    shape = (5, taps, channels)
    source, target = Arena(30 * channels, seed=5), Arena(18 * channels)
    channel = np.arange(channels)
    there = [
        (page * 6 * channels + 2 * c, (i * channels + c) * 6, taps, 2 * channels, 2, 1)
        for i, page in enumerate(pages)
        for c in channel.tolist()
    ]
    run(table_of(source, target, *there))
    want = source.bytes.view(np.int16).reshape(shape)[pages].transpose(0, 2, 1)
    assert np.array_equal(target.bytes.view(np.int16).reshape(want.shape), want)
    assert_copies(run, table_of(source, target, *there), target)

    home = Arena(30 * channels)
    run(table_of(target, home, *[(dst, src, n, d, s, code) for src, dst, n, s, d, code in there]))
    got = home.bytes.view(np.int16).reshape(shape)
    assert np.array_equal(got[pages], source.bytes.view(np.int16).reshape(shape)[pages])
    assert np.all(home.bytes.reshape(5, -1)[[1, 3]] == 0xA5)


def windows(
    ways: int, count: int, code: CopyCode, inverse: bool, places: tuple[list[int], list[int]]
) -> tuple[list[tuple[int, ...]], int]:
    """Return rows of runs whose ``ways`` rows alternate on one side, and the memory that they need.

    On each side run ``i`` lies at ``places[side][i]``, counted in runs with a gap behind them.
    """
    units = [int(SRC_BYTES[code]), int(DST_BYTES[code])]
    i_run, i_way = (index.ravel() for index in np.mgrid[: len(places[0]), :ways])
    rows = np.empty((len(i_run), 6), np.int64)
    for side, unit in enumerate(units):
        begin = np.array(places[side])[i_run] * ways * (count + 5)
        apart = (side == 0) == inverse
        rows[:, side] = (begin + (i_way if apart else i_way * (count + 5))) * unit
        rows[:, 3 + side] = (ways if apart else 1) * unit
    rows[:, 2], rows[:, 5] = count, code
    size = (1 + max(max(side) for side in places)) * ways * (count + 5) * max(units)
    return [tuple(row) for row in np.random.default_rng(ways).permutation(rows).tolist()], size


@pytest.mark.parametrize("complete", [True, False])
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("code", [CopyCode.COPY_2, CopyCode.F32_BF16, CopyCode.BF16_F32])
@pytest.mark.parametrize(
    ("runs", "ways", "count"), [(5, 3, 40), (2, 2, 1500), (40, 4, 600), (400, 4, 60)]
)
def test_rows_that_interlace_on_one_side(
    runs: int, ways: int, count: int, code: CopyCode, inverse: bool, complete: bool
) -> None:
    order = np.random.default_rng(runs).permutation(runs).tolist()
    rows, size = windows(ways, count, code, inverse, (list(range(runs)), order))
    source, target = Arena(size, seed=1), Arena(size)
    table = table_of(source, target, *rows[0 if complete else 1 :])
    assert_copies(copies.copy_pieces, table, target)


def interesting(dtype: torch.dtype) -> torch.Tensor:
    """Return numbers that are easily copied wrongly, and many others.

    These are NaN, infinities, zeros, denormals, halfway cases and the largest numbers.
    """
    int_dtype = {4: torch.int32, 2: torch.int16}[dtype.itemsize]
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    if dtype != torch.float32:
        return bits.to(int_dtype).view(dtype)
    # Around every fifth bfloat16: just below, at, and just above the halfway to the next.
    edges = torch.tensor([0, -(2**15), 1, 0x7F7F, 0x7F80, -0x80, 0x7FC0, 0x7BFF, 0x7C00])
    bits = torch.cat([bits[::5], edges.to(torch.int32)])
    spread = [(bits << 16) + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    halves = bits.to(torch.int16).view(torch.float16).to(torch.float32)
    spread += [halves, halves * (1 + 2**-11), halves * (1 + 2**-11 + 2**-23)]
    return torch.cat([value.view(torch.float32) for value in spread])


@on_both
@pytest.mark.parametrize("code", CASTS, ids=lambda code: code.name)
def test_casts_round_as_torch_does(run: CopyPieces, code: CopyCode) -> None:
    src_dtype, dst_dtype = reference.COPIED[code]
    value = interesting(src_dtype)
    got = torch.zeros(len(value), dtype=dst_dtype)
    row = [value.data_ptr(), got.data_ptr(), len(value), value.itemsize, got.itemsize, code]
    run(PieceTable.checked(np.array([row], dtype=np.int64)))
    want = value.to(dst_dtype)
    nan = want.isnan()
    assert torch.equal(got.isnan(), nan)
    assert torch.equal(got.view(torch.uint8).view(len(got), -1)[~nan],
                       want.view(torch.uint8).view(len(got), -1)[~nan])  # fmt: skip


def test_bfloat16_ties_go_to_even() -> None:
    value = torch.tensor([0x3F808000, 0x3F818000, 0x3F808001, 1, 0x7F7FFFFF], dtype=torch.int32)
    for run in (copies.copy_pieces, triton_copy) if not CUDA else (copies.copy_pieces,):
        got = torch.zeros(5, dtype=torch.int16)
        row = [value.data_ptr(), got.data_ptr(), 5, 4, 2, CopyCode.F32_BF16]
        run(PieceTable.checked(np.array([row], dtype=np.int64)))
        assert got.tolist() == [0x3F80, 0x3F82, 0x3F81, 0, 0x7F80]


@given(tables())
@settings(max_examples=250, suppress_health_check=[HealthCheck.too_slow])
def test_twin_copies_what_the_definition_copies(drawn: tuple[PieceTable, Arena]) -> None:
    assert_copies(copies.copy_pieces, *drawn)


@interpreted
@given(tables(max_rows=12))
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
def test_kernel_copies_what_the_definition_copies(drawn: tuple[PieceTable, Arena]) -> None:
    assert_copies(triton_copy, *drawn)


PATHS = {  # rows, bytes of a row, gap between destinations: every way through the twin
    "memmove": (3, 300_001, 300_002),
    "even-destination": (200, 1000, 1008),
    "dense-destination": (200, 1000, 1000),
    "scattered": (200, 1000, None),
    "scattered-few": (20, 1000, None),
    "scattered-long": (200, 40_000, None),
}


@pytest.mark.parametrize(("n", "length", "gap"), PATHS.values(), ids=PATHS.keys())
@pytest.mark.parametrize("inverse", [False, True], ids=["gather", "scatter"])
def test_runs_of_bytes(n: int, length: int, gap: int | None, inverse: bool) -> None:
    rng = np.random.default_rng(n)
    stride = length + 3
    pool, staging = Arena(3 * n * stride, seed=1), Arena(3 * n * stride, seed=2)
    here = rng.permutation(3 * n)[:n] * stride
    there = rng.permutation(3 * n)[:n] * stride if gap is None else np.arange(n) * gap
    target, source = (pool, staging) if inverse else (staging, pool)
    rows = np.ones((n, 6), dtype=np.int64) * [0, 0, length, 1, 1, CopyCode.COPY_1]
    rows[:, 0 if inverse else 1] = staging.address + there
    rows[:, 1 if inverse else 0] = pool.address + here
    before, frozen = target.memory.copy(), source.memory.copy()
    copy_pieces(PieceTable.checked(rows))
    for src, dst in rows[:, :2].tolist():
        at = dst - target.memory.ctypes.data
        src -= source.memory.ctypes.data
        before[at : at + length] = source.memory[src : src + length]
    assert np.array_equal(target.memory, before)
    assert np.array_equal(source.memory, frozen)


@pytest.mark.parametrize(("src_gap", "dst_gap"), [(1024, 1088), (1088, 1024), (1024, 1024)])
def test_even_runs_to_even_runs(src_gap: int, dst_gap: int) -> None:
    n, length = 200, 1024
    source, target = Arena(n * src_gap, seed=1), Arena(n * dst_gap)
    rows = [(i * src_gap, i * dst_gap, length, 1, 1, CopyCode.COPY_1) for i in range(n)]
    assert_copies(copies.copy_pieces, table_of(source, target, *rows), target)


@pytest.mark.parametrize("inverse", [False, True], ids=["gather", "scatter"])
def test_staging_with_gaps(inverse: bool) -> None:
    # Rows of other lengths lie between the pages of each row of a layer.
    n, length, each = 600, 1000, 200
    pool, staging = Arena(n * length, seed=1), Arena(n * length + 3 * 500, seed=2)
    page = np.random.default_rng(0).permutation(n) * length
    there = np.arange(n) * length + np.arange(n) // each * 500
    ends = (there, page) if inverse else (page, there)
    rows = [(*at, length, 1, 1, CopyCode.COPY_1) for at in zip(*ends, strict=True)]
    source, target = (staging, pool) if inverse else (pool, staging)
    assert_copies(copies.copy_pieces, table_of(source, target, *rows), target)


@pytest.mark.parametrize(("n", "length"), [(100, 1000), (240, 1000), (240, 1024)])
def test_staging_between_the_pages_of_a_pool(n: int, length: int) -> None:
    # The spans of source and destination overlap, though no row does.
    pool = Arena(3 * n * length, seed=7)
    before = pool.memory.copy()
    page = np.r_[0:n, 2 * n : 3 * n][np.random.default_rng(0).permutation(2 * n)[:n]]
    rows = np.ones((n, 6), dtype=np.int64) * [0, 0, length, 1, 1, CopyCode.COPY_1]
    rows[:, 0] = pool.address + (n + np.arange(n)) * length
    rows[:, 1] = pool.address + page * length
    copy_pieces(PieceTable.checked(rows))
    want = before[64:-64].reshape(3 * n, length)
    want[page] = want[n : 2 * n]
    assert np.array_equal(pool.memory, before)


def test_hundreds_of_rows_of_different_lengths() -> None:
    source, target = Arena(1 << 20, seed=8), Arena(1 << 17)
    count = np.random.default_rng(0).permutation(400)
    rows = np.stack([count * 4, np.cumsum(count) - count, count, *[count * 0] * 3], axis=1)
    rows[:, 3:] = (3, 1, CopyCode.COPY_1)
    rows[::2, 3] = 1
    assert_copies(copies.copy_pieces, table_of(source, target, *map(tuple, rows.tolist())), target)


@pytest.mark.parametrize(("length", "step"), [(100, 1), (50, 2)], ids=["runs", "strided"])
def test_rows_far_apart_in_the_address_space(length: int, step: int) -> None:
    # Heap and mapped memory lie 2**45 bytes apart, and a view of rows of both spans that distance.
    n = 250
    heap = [np.arange(100 * n, dtype=np.int64).astype(np.uint8), np.zeros(100 * n, np.uint8)]
    mapped = np.zeros(1 << 26, np.uint8)
    mapped[1 << 25 :] = 7
    begin = 128 * np.arange(n)
    rows = np.ones((2 * n, 6), np.int64) * [0, 0, length, step, step, CopyCode.COPY_1]
    rows[:n, 0], rows[:n, 1] = heap[0].ctypes.data + 100 * np.arange(n), mapped.ctypes.data + begin
    rows[n:, 0] = mapped.ctypes.data + (1 << 25) + begin
    rows[n:, 1] = heap[1].ctypes.data + 100 * np.arange(n)
    copies.copy_pieces(PieceTable.checked(rows))
    got = mapped[: 128 * n].reshape(n, 128)[:, :100]
    want = heap[0].reshape(n, 100)
    assert np.array_equal(got[:, ::step], want[:, ::step])
    assert np.all(heap[1].reshape(n, 100)[:, ::step] == 7)
    assert step == 1 or not got[:, 1::step].any()
