"""Piece tables, and what one GPU launch makes of them: rules, codes, rewriting and tiles."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from kernel_arena import Arena, assert_copies, interpreted, tables

from restow.kernels import (
    CopyCode,
    PieceColumn,
    PieceTable,
    PieceTableError,
    UnsupportedCast,
    copy_code,
    reference,
)
from restow.kernels.codes import Int64s
from restow.kernels.copy import DevicePieces
from restow.kernels.launch_table import BOX_16, RUN_16, VECTORS, LaunchTable
from restow.kernels.tables import even_runs, tiles

GOOD = (800, 1600, 5, 2, 6, CopyCode.COPY_2)


def rows(*edits: tuple[PieceColumn, int]) -> Int64s:
    table = np.array([GOOD, GOOD, GOOD], dtype=np.int64)
    for column, value in edits:
        table[1, column] = value
    return table


@pytest.mark.parametrize(
    "edit",
    [
        (PieceColumn.CODE, 10),
        (PieceColumn.CODE, -1),
        (PieceColumn.COUNT, -1),
        (PieceColumn.SRC_STEP_BYTES, 0),
        (PieceColumn.DST_STEP_BYTES, -6),
        (PieceColumn.SRC_STEP_BYTES, 3),
        (PieceColumn.SRC_ADDRESS, 801),
        (PieceColumn.DST_ADDRESS, 1601),
        (PieceColumn.SRC_ADDRESS, 0),
        (PieceColumn.DST_ADDRESS, -2),
    ],
    ids=lambda edit: f"{edit[0].name}={edit[1]}",
)
def test_a_broken_row_is_named(edit: tuple[PieceColumn, int]) -> None:
    with pytest.raises(PieceTableError, match=f"row 1: {edit[0].name} {edit[1]} ") as caught:
        PieceTable.checked(rows(edit))
    assert caught.value.row == 1


@pytest.mark.parametrize(
    "array", [np.zeros((2, 5), np.int64), np.zeros((2, 6), np.int32), np.zeros(6, np.int64)]
)
def test_another_shape_or_dtype_is_refused(array: np.ndarray[Any, Any]) -> None:
    with pytest.raises(PieceTableError, match=r"want int64 \[n, 6\]"):
        PieceTable.checked(array)


def test_steps_of_single_elements_do_not_matter() -> None:
    PieceTable.checked(rows((PieceColumn.COUNT, 1), (PieceColumn.SRC_STEP_BYTES, -1)))


def test_bytes_that_are_written_are_counted() -> None:
    table = PieceTable.checked(
        np.array([GOOD, (800, 1600, 7, 4, 2, CopyCode.F32_BF16)], dtype=np.int64)
    )
    assert table.bytes_written == 10 + 14


def test_codes_of_dtypes() -> None:
    assert copy_code("bfloat16", "bfloat16") == CopyCode.COPY_2
    assert copy_code("float8_e4m3fn", "float8_e4m3fn") == CopyCode.COPY_1
    assert copy_code("uint8", "uint8") == CopyCode.COPY_1
    assert copy_code("float32", "float32") == CopyCode.COPY_4
    assert copy_code("float16", "bfloat16") == CopyCode.F16_BF16
    for pair in (("float8_e4m3fn", "float32"), ("complex", "complex"), ("int16", "float16")):
        with pytest.raises(UnsupportedCast, match=pair[0]):
            copy_code(*pair)


def test_a_transpose_is_lengthened_to_one_row_per_tap() -> None:
    channel = np.arange(6144)
    table = np.stack([800 + 2 * channel, 99000 + 6 * channel, *[channel * 0] * 4], axis=1)
    table[:, PieceColumn.COUNT :] = (3, 2 * 6144, 2, CopyCode.COPY_2)
    elsewhere = table + np.array([800_000, 800_000, 0, 0, 0, 0])
    long = PieceTable.checked(np.concatenate([table, elsewhere]))
    assert long.lengthen().rows[:3].tolist() == [
        [800 + tap * 2 * 6144, 99000 + 2 * tap, 6144, 2, 6, CopyCode.COPY_2] for tap in range(3)
    ]
    assert len(long.lengthen().rows) == 6


def test_rows_that_abut_become_one() -> None:
    row = np.arange(100)
    table = np.stack([800 + 6 * row, 8000 + 6 * row, *[row * 0] * 4], axis=1)
    table[:, PieceColumn.COUNT :] = (3, 2, 2, CopyCode.COPY_2)
    assert PieceTable.checked(table).lengthen().rows.tolist() == [[800, 8000, 300, 2, 2, 1]]


@given(tables())
@settings(max_examples=100)
def test_rewritten_rows_copy_the_same_bytes(drawn: tuple[PieceTable, Arena]) -> None:
    table, target = drawn
    rewritten = table.lengthen()
    assert rewritten.bytes_written == table.bytes_written
    PieceTable.checked(rewritten.rows)
    assert_copies(lambda t: reference.copy_pieces(t.lengthen()), table, target)


def test_empty_tables_stay_empty() -> None:
    table = PieceTable.checked(np.zeros((0, 6), np.int64))
    assert len(table.lengthen().rows) == 0
    assert table.bytes_written == 0


def test_runs_that_meet_in_one_row_share_nothing() -> None:
    assert even_runs(np.array([0, 2, 4, 9, 14])).tolist() == [False, True, True, False, True]
    assert not even_runs(np.array([0, 2])).any()


def test_tiles_cover_every_row_once() -> None:
    got = tiles(np.array([5, 0, 8, 1]), 4).tolist()
    assert got == [[0, 0], [0, 4], [2, 0], [2, 4], [3, 0]]


def test_importing_the_package_leaves_triton_alone() -> None:
    code = "import sys, restow.kernels; sys.exit('triton' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


CPU = torch.device("cpu")
LENGTHS = (0, 1, 15, 16, 17, 31, 33, 511, 512, 513, 1000, 4095, 4096, 4097, 16_400)
Piece = tuple[int, int, int]  # source offset, gap before the destination, length


def runs(*rows: tuple[int, int, int]) -> Int64s:
    """Return contiguous rows, each given by source, destination and bytes."""
    table = np.ones((len(rows), len(PieceColumn)), dtype=np.int64)
    table[:, :3], table[:, PieceColumn.CODE] = rows, CopyCode.COPY_1
    return table


def codes(table: LaunchTable) -> list[tuple[int, int]]:
    """Return the code and the count of every tile."""
    work = table.tiles[:, 2]
    return list(zip((work >> 16 & 0xFFFF).tolist(), (work & 0xFFFF).tolist(), strict=True))


def assert_aligned(table: LaunchTable) -> None:
    """Check that all accesses are at multiples of their size.

    A GPU faults where they are not; the interpreter does not.
    """
    work, box = table.tiles[:, 2] & 0xFFFFFFFF, table.tiles[:, 2] >> 32
    unit = np.where(work >> 16 >= BOX_16, 16, 1 << (work >> 16))
    assert not np.any(table.tiles[:, :2] % unit[:, None])
    inner, steps, gaps = table.shapes[box, 0], table.shapes[box, 1:3], table.shapes[box, 3:]
    assert not np.any(gaps % unit[:, None])
    assert not np.any(steps[inner > 1] % unit[inner > 1, None])


def arena_at(multiple: int, length: int, seed: int | None = None) -> tuple[Arena, int]:
    """Return an arena, and the offset of an address in it that is a multiple of ``multiple``."""
    arena = Arena(length + multiple, seed)
    return arena, -arena.address % multiple


@interpreted
@pytest.mark.parametrize("vectors", VECTORS)
@given(
    st.lists(
        st.tuples(st.integers(0, 64), st.integers(0, 17), st.sampled_from(LENGTHS)),
        min_size=1,
        max_size=8,
    ),
    st.booleans(),
)
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_runs_at_any_alignment(vectors: int, pieces: list[Piece], reverse: bool) -> None:
    source, src_at = arena_at(16, 20_000, seed=len(pieces))
    target, dst_at = arena_at(16, 18_000 * len(pieces))
    want, end, rows = target.memory.copy(), dst_at, []
    at = target.address - target.memory.ctypes.data
    for src, gap, length in pieces:
        end += gap
        rows.append((source.address + src_at + src, target.address + end, length))
        want[at + end :][:length] = source.bytes[src_at + src :][:length]
        end += length
    table = PieceTable.checked(runs(*rows[:: -1 if reverse else 1]))
    assert_aligned(LaunchTable.of(table.rows, vectors))
    DevicePieces.of(table, CPU, vectors).copy()
    assert np.array_equal(target.memory, want)


@interpreted
@given(
    src=st.integers(0, 32), dst=st.integers(0, 32), length=st.sampled_from((1, 8, 15, 16, 48, 96)),
    src_gap=st.integers(-3, 200), dst_gap=st.integers(0, 40), n=st.sampled_from((2, 3, 33, 700)),
)  # fmt: skip
@example(src=0, dst=0, length=48, src_gap=56, dst_gap=0, n=33)  # the gap alone is crooked
@example(src=0, dst=0, length=48, src_gap=64, dst_gap=4, n=33)
@example(src=16, dst=5, length=48, src_gap=64, dst_gap=16, n=33)
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_short_evenly_spaced_rows_share_tiles(
    src: int, dst: int, length: int, src_gap: int, dst_gap: int, n: int
) -> None:
    # Sources may overlap, repeat or run backwards; destinations leave a gap or abut.
    source, src_at = arena_at(16, 150_000, seed=n)
    target, dst_at = arena_at(16, 32 + n * (length + dst_gap))
    row = np.arange(n)
    here, there = src_at + 3 * n + src + row * src_gap, dst_at + dst + row * (length + dst_gap)
    table = runs(*((a, b, length) for a, b in zip(here.tolist(), there.tolist(), strict=True)))
    table[:, 0] += source.address
    table[:, 1] += target.address
    want = target.memory.copy()
    at = target.address - target.memory.ctypes.data
    byte = np.arange(length)
    want[at + there[:, None] + byte] = source.bytes[here[:, None] + byte]
    assert_aligned(LaunchTable.of(table))
    DevicePieces.of(PieceTable.checked(table), CPU).copy()
    assert np.array_equal(target.memory, want)


def test_an_aligned_run_is_vectors_alone() -> None:
    assert codes(LaunchTable.of(runs((4096, 8192, 4096)))) == [(RUN_16, 256)]
    assert codes(LaunchTable.of(runs((4096, 8192, 9216)))) == [(RUN_16, 256)] * 2 + [(RUN_16, 64)]


def test_crooked_ends_are_peeled_where_both_sides_are_crooked_alike() -> None:
    table = LaunchTable.of(runs((4096 + 5, 8192 + 5, 11 + 32 + 7)))
    assert codes(table) == [(RUN_16, 2), (CopyCode.COPY_1, 11), (CopyCode.COPY_1, 7)]
    assert table.tiles[:, :2].tolist() == [[4112, 8208], [4101, 8197], [4144, 8240]]


@pytest.mark.parametrize(("off", "unit"), [(8, 8), (24, 8), (4, 4), (12, 4), (6, 2), (1, 1)])
def test_sides_that_differ_use_the_widest_common_unit(off: int, unit: int) -> None:
    table = LaunchTable.of(runs((4096 + off, 8192, 48)))
    assert codes(table) == [(unit.bit_length() - 1, 48 // unit)]


def test_a_tokens_slices_share_tiles_of_vectors() -> None:
    # A row is 128 bytes of a token of a page: the 256 vectors of a tile are 32 tokens.
    token = np.arange(64)
    rows = runs(*((4096 + 1024 * t, 2**20 + 512 * t, 128) for t in token.tolist()))
    table = LaunchTable.of(rows)
    assert codes(table) == [(BOX_16, 256)] * 2
    assert table.tiles[1, :2].tolist() == [4096 + 32 * 1024, 2**20 + 32 * 512]
    assert table.shapes.tolist() == [[8, 16, 16, 1024, 512]]


def test_a_transpose_walks_all_taps_in_one_tile() -> None:
    # Where one side is contiguous, so are the neighbours of a program's elements.
    channel = np.arange(6144)
    rows = np.stack([4096 + 2 * channel, 2**20 + 6 * channel, *[channel * 0] * 4], axis=1)
    rows[:, PieceColumn.COUNT :] = (3, 2 * 6144, 2, CopyCode.COPY_2)
    table = LaunchTable.of(rows)
    assert table.shapes.tolist() == [[3, 2 * 6144, 2, 2, 6]]
    assert codes(table)[0] == (CopyCode.COPY_2, 510)
    assert len(table.tiles) == -(-6144 // 170)


def test_long_tiles_are_for_tables_that_fill_a_gpu_with_them() -> None:
    many = [(2**30 + i * 2**20, 2**40 + i * 2**20, 2**20) for i in range(64)]
    assert LaunchTable.of(runs(*many)).vectors == VECTORS[1]
    assert LaunchTable.of(runs(*many[:8])).vectors == VECTORS[0]
    short = [(2**30 + i * 8192, 2**40 + i * 4096, 4096) for i in range(2**14)]
    assert LaunchTable.of(runs(*short)).vectors == VECTORS[0]


def test_addresses_beyond_32_bits_stay_whole() -> None:
    far = 2**46 + 2**33
    table = LaunchTable.of(runs((far, 2 * far, 5 * 2**30)))
    assert len(table.tiles) == 5 * 2**30 // (16 * VECTORS[1])
    assert table.tiles[-1, :2].tolist() == [far + 5 * 2**30 - 16384, 2 * far + 5 * 2**30 - 16384]


def test_nothing_to_copy_makes_no_tiles() -> None:
    assert not len(LaunchTable.of(np.zeros((0, 6), np.int64)).tiles)
    assert not len(LaunchTable.of(runs((4096, 8192, 0))).tiles)
