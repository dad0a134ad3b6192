"""Law: bytes read equal bytes needed; a replica is read once per destination, from one source."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from laws.checks import check_minimality
from laws.rounds import tried
from laws.strategies import STRATEGIES, Case, any_cases, family_cases
from restow.broker.families import ConvLayout, EngineSettings, Mamba2Spec, ModelSpec, build_layout
from restow.broker.layout import DType
from restow.broker.planner import Strategy, compile_programs, make_plan
from restow.broker.planner.program import READ_PAGES, Column


@tried("minimality")
@given(any_cases(), STRATEGIES)
def test_minimality(case: Case, strategy: Strategy) -> None:
    check_minimality(case, strategy)


@tried("minimality, twins")
@given(family_cases(engines=1), st.sampled_from([Strategy.SLICES, Strategy.AUTO]))
def test_equal_layouts_read_each_page_from_the_twin(case: Case, strategy: Strategy) -> None:
    (layout,) = case.layouts
    plan = make_plan(layout, layout)
    assert all(move.src_rank == move.dst_rank for move in plan.moves)
    check_minimality(replace(case, layouts=(layout, layout)), strategy)


def test_a_mamba_page_is_one_run_when_nothing_differs() -> None:
    spec = Mamba2Spec(0, 8, 4, 4, 2, 4, DType.BFLOAT16, DType.FLOAT32)
    for conv_layout in ConvLayout:
        layout = build_layout(
            ModelSpec("m", (spec,)), EngineSettings(tp=4, conv_layout=conv_layout)
        )
        for program in compile_programs(make_plan(layout, layout), Strategy.SLICES):
            (row,) = program.rows(READ_PAGES)
            assert row[Column.COUNT] == layout.ranks[0].regions[0].page_stride_bytes


def test_one_of_many_replicas_is_not_read_by_all() -> None:
    spec = Mamba2Spec(0, 8, 2, 2, 1, 4, DType.BFLOAT16, DType.BFLOAT16)
    model = ModelSpec("m", (spec,))
    four, eight = (build_layout(model, EngineSettings(tp=tp)) for tp in (4, 8))
    served = np.zeros(4, int)
    for move in make_plan(four, eight).moves:
        if move.field.endswith("conv.B"):
            served[move.src_rank] += 1
    assert served.tolist() == [2, 2, 2, 2]
