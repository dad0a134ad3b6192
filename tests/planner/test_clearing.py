"""Rows for speculative tokens become few rows that are zeroed, wherever states arrive."""

from __future__ import annotations

from dataclasses import replace

import pytest

from restow.broker.families import (
    AttentionSpec,
    ConvLayout,
    EngineSettings,
    Mamba2Spec,
    ModelSpec,
    build_layout,
)
from restow.broker.layout import DType, Scratch
from restow.broker.planner import compile_programs, make_plan
from restow.broker.planner.compile import cleared_rows
from restow.broker.planner.program import CLEAR_PAGES, Column, GroupPair, PageForm

MAMBA = Mamba2Spec(0, 8, 16, 16, 2, 4, DType.BFLOAT16, DType.FLOAT32)
MODEL = ModelSpec("m", (MAMBA, AttentionSpec(1, 4, 8, DType.BFLOAT16), replace(MAMBA, layer=2)))
COLUMNS = 8 * 16 + 2 * 2 * 16
STATES = GroupPair(PageForm("state", 0, 1), PageForm("state", 0, 1))


@pytest.mark.parametrize(
    ("conv", "rows_a_layer", "count", "step_bytes"),
    [
        (ConvLayout.SD, 1, 3 * COLUMNS * 2, 1),
        (ConvLayout.DS, 3, COLUMNS, 12),
    ],
)
def test_rows_of_a_conv_layout(
    conv: ConvLayout, rows_a_layer: int, count: int, step_bytes: int
) -> None:
    source = build_layout(MODEL, EngineSettings())
    settings = EngineSettings(conv_layout=conv, conv_rows_extra=3)
    (program,) = compile_programs(make_plan(source, build_layout(MODEL, settings)))
    assert len(program.rows(CLEAR_PAGES)) == 2 * rows_a_layer
    assert set(program.rows(CLEAR_PAGES)[:, Column.COUNT]) == {count}
    assert set(program.rows(CLEAR_PAGES)[:, Column.DST_STEP_BYTES]) == {step_bytes}


def test_what_p_keeps_for_speculation_is_nothing_to_d() -> None:
    source = build_layout(MODEL, EngineSettings(conv_rows_extra=3))
    (program,) = compile_programs(make_plan(source, build_layout(MODEL, EngineSettings())))
    assert not len(program.rows(CLEAR_PAGES))


def test_elements_that_lie_askew_are_cleared_one_by_one() -> None:
    (rank,) = build_layout(MODEL, EngineSettings()).ranks
    askew = Scratch(rank.regions[0].name, DType.BFLOAT16, 1, (5,), (6,))
    rows = cleared_rows(replace(rank, scratch=(askew,)), (STATES,))
    assert rows[:, Column.DST_OFFSET_BYTES].tolist() == [1, 7, 13, 19, 25]
    assert set(rows[:, Column.COUNT]) == {2}
    assert set(rows[:, Column.DST_DTYPE]) == {DType.UINT8}


def test_two_elements_apart_are_no_run_of_bytes() -> None:
    (rank,) = build_layout(MODEL, EngineSettings()).ranks
    apart = Scratch(rank.regions[0].name, DType.BFLOAT16, 2, (2,), (6,))
    (row,) = cleared_rows(replace(rank, scratch=(apart,)), (STATES,))
    assert (row[Column.COUNT], row[Column.DST_STEP_BYTES]) == (2, 6)
    assert row[Column.DST_DTYPE] == DType.BFLOAT16


def test_elements_are_cleared_one_by_one_where_pages_begin_askew() -> None:
    # Page 0 is aligned, and page 1 is not.
    (rank,) = build_layout(MODEL, EngineSettings()).ranks
    state = replace(rank.regions[0], page_stride_bytes=rank.regions[0].page_stride_bytes + 1)
    straight = Scratch(state.name, DType.BFLOAT16, 2, (5,), (6,))
    askew = replace(rank, regions=(state, *rank.regions[1:]), scratch=(straight,))
    rows = cleared_rows(askew, (STATES,))
    assert rows[:, Column.DST_OFFSET_BYTES].tolist() == [2, 8, 14, 20, 26]
    assert set(rows[:, Column.DST_DTYPE]) == {DType.UINT8}


def test_where_no_state_arrives_nothing_is_cleared() -> None:
    (rank,) = build_layout(MODEL, EngineSettings(conv_rows_extra=1)).ranks
    assert len(cleared_rows(rank, (STATES,))) == 2
    assert not len(cleared_rows(rank, ()))
