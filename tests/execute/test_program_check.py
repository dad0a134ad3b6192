"""Programs that would leave their pages are refused, whatever their numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from agent_harness.handover import programs
from agent_harness.world import make_case
from laws.strategies import SENDING
from restow.agents.binding.pages import Tokens
from restow.agents.errors import OrderTooLargeError, ProgramInvalidError
from restow.agents.execute.program_check import CheckedProgram
from restow.broker.layout import DType
from restow.broker.planner import GroupPair, PageForm, Program, Strategy
from restow.broker.planner.program import Column, SpanColumn

CASE = make_case("wide")
SRC_STRIDES = tuple(r.page_stride_bytes for r in CASE.source.ranks[0].regions)
DST_STRIDES = tuple(r.page_stride_bytes for r in CASE.destination.ranks[0].regions)
HUGE = 2**62


def _check(program: Program) -> CheckedProgram:
    checked = CheckedProgram(program)
    checked.check_source(0, SRC_STRIDES)
    checked.check_destination(DST_STRIDES)
    return checked


def _program(strategy: Strategy) -> Program:
    program = programs(CASE, strategy)[0]
    names = ("direct", "packed", "spans", "extracted", "cleared")
    return replace(program, **{name: getattr(program, name).copy() for name in names})


@pytest.mark.parametrize("strategy", SENDING)
def test_what_the_planner_makes_is_accepted(strategy: Strategy) -> None:
    _check(_program(strategy))


@pytest.mark.parametrize(
    ("column", "value"),
    [
        (Column.GROUP_PAIR, -1),
        (Column.GROUP_PAIR, 7),
        (Column.SRC_REGION, -1),
        (Column.SRC_REGION, 99),
        (Column.DST_REGION, 99),
        (Column.SRC_OFFSET_BYTES, -1),
        (Column.SRC_OFFSET_BYTES, HUGE),
        (Column.DST_OFFSET_BYTES, HUGE),
        (Column.COUNT, 0),
        (Column.COUNT, -5),
        (Column.COUNT, HUGE),
        (Column.SRC_STEP_BYTES, 0),
        (Column.SRC_STEP_BYTES, HUGE),
        (Column.DST_STEP_BYTES, HUGE),
        (Column.SRC_TOKEN_STRIDE_BYTES, -1),
        (Column.SRC_DTYPE, 0),
        (Column.SRC_DTYPE, 8),
        (Column.DST_DTYPE, -1),
        (Column.DST_DTYPE, DType.FLOAT8_E5M2),
    ],
)
@pytest.mark.parametrize("strategy", [one for one in SENDING if one is not Strategy.AUTO])
def test_a_row_with_one_wrong_number_is_refused(
    column: Column, value: int, strategy: Strategy
) -> None:
    program = _program(strategy)
    rows = max(program.direct, program.packed, program.extracted, key=len)
    rows[len(rows) // 2, column] = value
    with pytest.raises(ProgramInvalidError, match="a row"):
        _check(program)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        (SpanColumn.SRC_RANK, -1),
        (SpanColumn.SRC_RANK, 1),
        (SpanColumn.GROUP_PAIR, -1),
        (SpanColumn.GROUP_PAIR, 7),
        (SpanColumn.SRC_REGION, -1),
        (SpanColumn.SRC_REGION, 99),
        (SpanColumn.OFFSET_BYTES, -1),
        (SpanColumn.OFFSET_BYTES, HUGE),
        (SpanColumn.LENGTH_BYTES, 0),
        (SpanColumn.LENGTH_BYTES, 1),
        (SpanColumn.LENGTH_BYTES, -8),
        (SpanColumn.LENGTH_BYTES, 2 * HUGE - 1),
    ],
)
def test_a_span_with_one_wrong_number_is_refused(column: SpanColumn, value: int) -> None:
    program = _program(Strategy.WHOLE)
    program.spans[0, column] = value
    with pytest.raises(ProgramInvalidError, match=r"a span|has a span|leaves its span"):
        _check(program)


@pytest.mark.parametrize("table", ["packed", "interleaved"])
def test_a_row_that_would_gather_weights_is_refused(table: str) -> None:
    """An engine may offer weights and be a source."""
    strategy = Strategy.PACK if table == "packed" else Strategy.INTERLEAVE
    checked = CheckedProgram(programs(CASE, strategy)[0])
    rows = getattr(checked.program, table)
    regions = set(rows[rows[:, Column.SRC_RANK] == 0, Column.SRC_REGION].tolist())
    assert regions
    constant = tuple(index in regions for index in range(len(SRC_STRIDES)))
    checked.check_source(0, SRC_STRIDES)
    with pytest.raises(ProgramInvalidError, match="reads a constant region"):
        checked.check_source(0, SRC_STRIDES, constant)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        (Column.GROUP_PAIR, 7),
        (Column.DST_REGION, 99),
        (Column.DST_OFFSET_BYTES, -1),
        (Column.DST_OFFSET_BYTES, HUGE),
        (Column.COUNT, HUGE),
        (Column.DST_STEP_BYTES, 0),
    ],
)
def test_a_cleared_row_with_one_wrong_number_is_refused(column: Column, value: int) -> None:
    program = _program(Strategy.SLICES)
    assert len(program.cleared)
    program.cleared[0, column] = value
    with pytest.raises(ProgramInvalidError, match="a row"):
        _check(program)


def test_pages_of_tokens_are_not_cleared() -> None:
    program = _program(Strategy.SLICES)
    per_token = [pair.per_token for pair in program.group_pairs].index(True)
    program.cleared[0, [Column.GROUP_PAIR, Column.SRC_TOKEN_STRIDE_BYTES]] = per_token, 1
    program.cleared[0, Column.DST_TOKEN_STRIDE_BYTES] = 1
    with pytest.raises(ProgramInvalidError, match="a row clears pages of tokens"):
        _check(program)


def test_a_row_stays_inside_its_span_and_a_span_inside_its_page() -> None:
    program = _program(Strategy.WHOLE)
    region = program.spans[0, SpanColumn.SRC_REGION]
    program.spans[0, SpanColumn.OFFSET_BYTES] = (
        SRC_STRIDES[region] - program.spans[0, SpanColumn.LENGTH_BYTES]
    )
    _check(program)
    program.spans[0, SpanColumn.OFFSET_BYTES] += 1
    with pytest.raises(ProgramInvalidError, match="a span leaves its source page"):
        _check(program)
    program = _program(Strategy.WHOLE)
    program.spans[0, SpanColumn.LENGTH_BYTES] -= 1
    with pytest.raises(ProgramInvalidError, match="a row leaves its span"):
        _check(program)


@pytest.mark.parametrize("token_stride", [0, HUGE])
def test_the_last_token_of_a_page_counts(token_stride: int) -> None:
    program = _program(Strategy.SLICES)
    per_token = np.array([pair.per_token for pair in program.group_pairs])
    row = int(np.argmax(per_token[program.direct[:, Column.GROUP_PAIR]]))
    program.direct[row, Column.DST_TOKEN_STRIDE_BYTES] = token_stride
    with pytest.raises(ProgramInvalidError):
        _check(program)


def test_one_byte_beyond_the_page_is_refused_and_the_last_byte_is_not() -> None:
    program = _program(Strategy.SLICES)
    ends = program.direct[:, Column.DST_OFFSET_BYTES] + program.direct[:, Column.COUNT]
    snapshots = program.direct[:, Column.DST_TOKEN_STRIDE_BYTES] == 0
    row = int(np.argmax(np.where(snapshots, ends, 0)))
    region = program.direct[row, Column.DST_REGION]
    program.direct[row, Column.DST_OFFSET_BYTES] += DST_STRIDES[region] - ends[row]
    _check(program)
    program.direct[row, Column.DST_OFFSET_BYTES] += 1
    with pytest.raises(ProgramInvalidError, match="leaves its destination page"):
        _check(program)


def test_a_strided_row_is_not_read_into_place() -> None:
    packed = _program(Strategy.PACK)
    strided = packed.packed[packed.packed[:, Column.SRC_DTYPE] != DType.UINT8]
    assert len(strided)
    with pytest.raises(ProgramInvalidError, match="no run of bytes"):
        CheckedProgram(replace(packed, direct=strided))


@pytest.mark.parametrize(
    "pair",
    [
        GroupPair(PageForm("a", 0, 1), PageForm("b", 4, 1)),
        GroupPair(PageForm("a", -1, 1), PageForm("b", -1, 1)),
        GroupPair(PageForm("a", 4, 0), PageForm("b", 4, 1)),
        GroupPair(PageForm("a", 4, 1), PageForm("b", 4, 1), window_tokens=-1),
        GroupPair(PageForm("a", 0, 1), PageForm("b", 0, 1), window_tokens=4),
    ],
)
def test_lists_that_do_not_go_together_are_refused(pair: GroupPair) -> None:
    program = _program(Strategy.SLICES)
    with pytest.raises(ProgramInvalidError, match="groups a and b"):
        CheckedProgram(replace(program, group_pairs=(pair,)))


def test_an_order_for_more_descriptors_than_fit_is_refused_before_they_are_made() -> None:
    checked = _check(_program(Strategy.SLICES))
    for _ in range(2):
        checked.check_size(Tokens(0, 21))
        with pytest.raises(OrderTooLargeError):
            checked.check_size(Tokens(0, 2**31 - 1))


def test_every_source_rank_is_held_to_its_own_pages() -> None:
    program = _program(Strategy.SLICES)
    rows = program.direct[program.direct[:, Column.SRC_RANK] == 0]
    other = rows.copy()
    other[:, Column.SRC_RANK] = 1
    checked = CheckedProgram(replace(program, direct=np.concatenate([rows, other])))
    short = tuple(1 for _ in SRC_STRIDES)

    checked.check_source(0, SRC_STRIDES)
    with pytest.raises(ProgramInvalidError, match="leaves its source page"):
        checked.check_source(1, short)
    checked.check_source(2, short)  # has no rows
