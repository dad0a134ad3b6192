"""Products that would leave their memory are refused, and rows that would write weights."""

from __future__ import annotations

import numpy as np
import pytest

from agent_harness.handover import programs
from agent_harness.steps import with_rows
from agent_harness.world import make_case
from restow.agents.execute.program_check import CheckedProgram
from restow.agents.memory.errors import ProgramInvalidError
from restow.broker.layout import DType
from restow.broker.planner import Program, Strategy
from restow.broker.planner.program import (
    CLEAR_PAGES,
    GATHER_IN_ORDER,
    PROJECT_SPANS,
    READ_PAGES,
    SCATTER_PLACED,
    SCATTER_SPANS,
    Column,
    Form,
    ProjectColumn,
)

MIXING = make_case("recompute")
CONSTANT = tuple(region.constant for region in MIXING.destination.ranks[0].regions)
WEIGHTS = CONSTANT.index(True)
HUGE = 2**62


def _check_mixing(program: Program) -> CheckedProgram:
    checked = CheckedProgram(program)
    for rank in MIXING.source.ranks:
        checked.check_source(rank.rank, tuple(r.page_stride_bytes for r in rank.regions))
    regions = MIXING.destination.ranks[0].regions
    checked.check_destination(tuple(r.page_stride_bytes for r in regions), CONSTANT)
    return checked


def _mixing_program() -> Program:
    program = programs(MIXING, Strategy.RECOMPUTE)[0]
    return with_rows(program, PROJECT_SPANS, program.rows(PROJECT_SPANS).copy())


def test_projected_rows_of_the_planner_are_accepted() -> None:
    program = _mixing_program()
    assert len(program.rows(PROJECT_SPANS))
    _check_mixing(program)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        *((column, -1) for column in ProjectColumn),
        *((column, HUGE) for column in ProjectColumn),
        (ProjectColumn.TAPS, 0),
        (ProjectColumn.TAPS, 4),
        (ProjectColumn.HIDDEN, 0),
        (ProjectColumn.HIDDEN, 25),
        (ProjectColumn.CHANNELS, 0),
        (ProjectColumn.SPAN, 99),
        (ProjectColumn.SRC_OFFSET_BYTES, 2),
        (ProjectColumn.SRC_OFFSET_BYTES, 1),
        (ProjectColumn.SRC_TAP_STRIDE_BYTES, 0),
        (ProjectColumn.SRC_TAP_STRIDE_BYTES, 50),
        (ProjectColumn.DTYPE, DType.UINT8),
        (ProjectColumn.DTYPE, 8),
        (ProjectColumn.DTYPE, DType.FLOAT32),
        (ProjectColumn.DST_DTYPE, DType.FLOAT8_E4M3FN),
        (ProjectColumn.WEIGHT_REGION, 0),
        (ProjectColumn.WEIGHT_OFFSET_BYTES, 2),
        (ProjectColumn.WEIGHT_STRIDE_BYTES, 50),
        (ProjectColumn.GROUP_PAIR, 99),
        (ProjectColumn.DST_REGION, WEIGHTS),
        (ProjectColumn.DST_OFFSET_BYTES, 1),
        (ProjectColumn.DST_STRIDE_BYTES, 0),
        (ProjectColumn.DST_STRIDE_BYTES, 1 << 20),
        (ProjectColumn.DST_TAP_STRIDE_BYTES, 1 << 20),
    ],
)
def test_a_projected_row_with_one_wrong_number_is_refused(
    column: ProjectColumn, value: int
) -> None:
    program = _mixing_program()
    program.rows(PROJECT_SPANS)[-1, column] = value
    with pytest.raises(ProgramInvalidError, match="a row of PROJECT"):
        _check_mixing(program)


def test_weights_multiplied_more_than_once_are_refused() -> None:
    program = _mixing_program()
    doubled = with_rows(program, PROJECT_SPANS, np.concatenate([program.rows(PROJECT_SPANS)] * 2))
    with pytest.raises(ProgramInvalidError, match="multiply the same weights"):
        _check_mixing(doubled)


@pytest.mark.parametrize(
    ("form", "strategy"),
    [
        (READ_PAGES, Strategy.SLICES),
        (GATHER_IN_ORDER, Strategy.PACK),
        (SCATTER_SPANS, Strategy.WHOLE),
        (SCATTER_PLACED, Strategy.INTERLEAVE),
        (CLEAR_PAGES, Strategy.SLICES),
    ],
)
def test_a_row_that_would_write_weights_is_refused(form: Form, strategy: Strategy) -> None:
    program = programs(MIXING, strategy)[0]
    rows = program.rows(form).copy()
    assert len(rows)
    rows[0, Column.DST_REGION] = WEIGHTS
    rows[0, Column.DST_OFFSET_BYTES] = 0
    with pytest.raises(ProgramInvalidError, match="writes a constant region"):
        _check_mixing(with_rows(program, form, rows))
