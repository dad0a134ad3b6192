"""Piece tables: rules, codes, rewriting and tiles."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from kernel_arena import Arena, assert_copies, tables

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
