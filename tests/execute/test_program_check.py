"""Programs that would leave their pages or write weights are refused, whatever their numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from agent_harness.handover import programs, with_rows
from agent_harness.world import make_case
from fuzzing.agent_house import PROGRAMS
from laws.strategies import SENDING
from restow.agents.binding.copies import bind_copies
from restow.agents.binding.operands import DST, SRC, paged
from restow.agents.binding.pages import Blocks, RegionTable, TokenRange
from restow.agents.execute.program_check import CheckedProgram
from restow.agents.memory.errors import OrderTooLargeError, ProgramInvalidError
from restow.broker.families import EngineSettings, MlaSpec, ModelSpec, build_layout
from restow.broker.layout import DType, TokenClass
from restow.broker.planner import (
    GroupPair,
    PageForm,
    Program,
    Strategy,
    compile_programs,
    make_plan,
)
from restow.broker.planner.program import (
    CLEAR_PAGES,
    GATHER_IN_ORDER,
    GATHERED,
    PROJECT_SPANS,
    READ_PAGES,
    READ_SPANS,
    SCATTER_PLACED,
    SCATTER_SPANS,
    Column,
    Form,
    ProjectColumn,
    Step,
)
from restow.broker.rpc.wire_program import program_from_proto, program_to_proto

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
    steps = tuple(Step(step.form, step.rows.copy()) for step in program.steps)
    return replace(program, steps=steps)


@pytest.mark.parametrize("strategy", SENDING)
def test_what_the_planner_makes_is_accepted(strategy: Strategy) -> None:
    _check(_program(strategy))


@pytest.mark.parametrize(("name", "strategy"), [*PROGRAMS, *(("stages", one) for one in SENDING)])
@pytest.mark.parametrize("hashed", [False, True])
def test_the_part_of_each_source_is_accepted(name: str, strategy: Strategy, hashed: bool) -> None:
    # Where a rank reads from several sources, spans too, each source has its own rows alone.
    case = make_case(name)
    strides = {
        rank.rank: tuple(region.page_stride_bytes for region in rank.regions)
        for rank in case.source.ranks
    }
    for program in programs(case, strategy).values():
        parts = [
            program_from_proto(program_to_proto(program, src_rank, hashed))
            for src_rank in (program.src_ranks if hashed else program.staging_ranks)
        ]
        for part in parts:
            (src_rank,) = part.src_ranks
            CheckedProgram(part).check_source(src_rank, strides[src_rank])
        if (name, strategy, hashed) == ("stages", Strategy.WHOLE, True):
            assert [len(part.rows(READ_SPANS)) > 0 for part in parts].count(True) > 1


Numbers = Mapping[Column, tuple[int, ...]]
WRONG_ROW: Numbers = {
    Column.GROUP_PAIR: (-1, 7),
    Column.SRC_REGION: (-1, 99),
    Column.DST_REGION: (99,),
    Column.SRC_OFFSET_BYTES: (-1, HUGE),
    Column.DST_OFFSET_BYTES: (HUGE,),
    Column.COUNT: (0, -5, HUGE),
    Column.SRC_STEP_BYTES: (0, HUGE),
    Column.DST_STEP_BYTES: (HUGE,),
    Column.SRC_TOKEN_STRIDE_BYTES: (-1,),
    Column.SRC_DTYPE: (0, 8),
    Column.DST_DTYPE: (-1, DType.FLOAT8_E5M2),
}
WRONG_SPAN: Numbers = {
    Column.SRC_RANK: (-1, 1),
    Column.GROUP_PAIR: (-1, 7),
    Column.SRC_REGION: (-1, 99),
    Column.SRC_OFFSET_BYTES: (-1, HUGE),
    Column.COUNT: (0, 1, -8, 2 * HUGE - 1),
}
WRONG_CLEARED: Numbers = {
    Column.GROUP_PAIR: (7,),
    Column.DST_REGION: (99,),
    Column.DST_OFFSET_BYTES: (-1, HUGE),
    Column.COUNT: (HUGE,),
    Column.DST_STEP_BYTES: (0,),
}
COPIED = (READ_PAGES, GATHER_IN_ORDER, SCATTER_SPANS)
WRONG = [
    *((one, COPIED, WRONG_ROW) for one in SENDING if one is not Strategy.AUTO),
    (Strategy.WHOLE, (READ_SPANS,), WRONG_SPAN),
    (Strategy.SLICES, (CLEAR_PAGES,), WRONG_CLEARED),
]


@pytest.mark.parametrize(
    ("strategy", "forms", "column", "value"),
    [
        (strategy, forms, column, value)
        for strategy, forms, numbers in WRONG
        for column, values in numbers.items()
        for value in values
    ],
)
def test_a_row_with_one_wrong_number_is_refused(
    strategy: Strategy, forms: Sequence[Form], column: Column, value: int
) -> None:
    program = _program(strategy)
    rows = max((program.rows(form) for form in forms), key=len)
    rows[len(rows) // 2, column] = value
    with pytest.raises(ProgramInvalidError, match=r"a row|takes from a span|leaves its span"):
        _check(program)


@pytest.mark.parametrize("form", GATHERED)
def test_a_row_that_would_gather_weights_is_refused(form: Form) -> None:
    # An engine may offer weights and be a source.
    strategy = Strategy.PACK if form == GATHER_IN_ORDER else Strategy.INTERLEAVE
    checked = CheckedProgram(programs(CASE, strategy)[0])
    rows = checked.program.rows(form)
    regions = set(rows[rows[:, Column.SRC_RANK] == 0, Column.SRC_REGION].tolist())
    assert regions
    constant = tuple(index in regions for index in range(len(SRC_STRIDES)))
    checked.check_source(0, SRC_STRIDES)
    with pytest.raises(ProgramInvalidError, match="reads a constant region"):
        checked.check_source(0, SRC_STRIDES, constant)


@pytest.mark.parametrize(
    ("stride_bytes", "why"), [(0, "DST_TOKEN_STRIDE_BYTES below 1"), (HUGE, "leaves its dest")]
)
def test_tokens_are_cleared_inside_their_pages(stride_bytes: int, why: str) -> None:
    program = _program(Strategy.SLICES)
    per_token = [pair.per_token for pair in program.group_pairs].index(True)
    program.rows(CLEAR_PAGES)[0, [Column.GROUP_PAIR, Column.SRC_TOKEN_STRIDE_BYTES]] = per_token, 1
    program.rows(CLEAR_PAGES)[0, Column.DST_TOKEN_STRIDE_BYTES] = stride_bytes
    with pytest.raises(ProgramInvalidError, match=rf"a row of CLEAR .* {why}"):
        _check(program)


def test_a_row_stays_inside_its_span_and_a_span_inside_its_page() -> None:
    program = _program(Strategy.WHOLE)
    region = program.rows(READ_SPANS)[0, Column.SRC_REGION]
    program.rows(READ_SPANS)[0, Column.SRC_OFFSET_BYTES] = (
        SRC_STRIDES[region] - program.rows(READ_SPANS)[0, Column.COUNT]
    )
    _check(program)
    program.rows(READ_SPANS)[0, Column.SRC_OFFSET_BYTES] += 1
    with pytest.raises(ProgramInvalidError, match="to SPAN leaves its source page"):
        _check(program)
    program = _program(Strategy.WHOLE)
    program.rows(READ_SPANS)[0, Column.COUNT] -= 1
    with pytest.raises(ProgramInvalidError, match="leaves its span"):
        _check(program)


@pytest.mark.parametrize("token_stride", [0, HUGE])
def test_the_last_token_of_a_page_counts(token_stride: int) -> None:
    program = _program(Strategy.SLICES)
    per_token = np.array([pair.per_token for pair in program.group_pairs])
    row = int(np.argmax(per_token[program.rows(READ_PAGES)[:, Column.GROUP_PAIR]]))
    program.rows(READ_PAGES)[row, Column.DST_TOKEN_STRIDE_BYTES] = token_stride
    with pytest.raises(ProgramInvalidError):
        _check(program)


def test_one_byte_beyond_the_page_is_refused_and_the_last_byte_is_not() -> None:
    program = _program(Strategy.SLICES)
    direct = program.rows(READ_PAGES)
    ends = direct[:, Column.DST_OFFSET_BYTES] + direct[:, Column.COUNT]
    snapshots = direct[:, Column.DST_TOKEN_STRIDE_BYTES] == 0
    row = int(np.argmax(np.where(snapshots, ends, 0)))
    region = direct[row, Column.DST_REGION]
    direct[row, Column.DST_OFFSET_BYTES] += DST_STRIDES[region] - ends[row]
    _check(program)
    direct[row, Column.DST_OFFSET_BYTES] += 1
    with pytest.raises(ProgramInvalidError, match="leaves its destination page"):
        _check(program)


def test_a_strided_row_is_not_read_into_place() -> None:
    packed = _program(Strategy.PACK)
    rows = packed.rows(GATHER_IN_ORDER)
    strided = rows[rows[:, Column.SRC_DTYPE] != DType.UINT8]
    assert len(strided)
    with pytest.raises(ProgramInvalidError, match="not a run of bytes"):
        CheckedProgram(with_rows(packed, READ_PAGES, strided))


@pytest.mark.parametrize(
    "pair",
    [
        GroupPair(PageForm("a", 0, 1), PageForm("b", 4, 1)),
        GroupPair(PageForm("a", -1, 1), PageForm("b", -1, 1)),
        GroupPair(PageForm("a", 4, 0), PageForm("b", 4, 1)),
        GroupPair(PageForm("a", 4, 1), PageForm("b", 4, 1), window_tokens=-1),
        GroupPair(PageForm("a", 0, 1), PageForm("b", 0, 1), window_tokens=4),
        GroupPair(PageForm("a", 4, 1, TokenClass(2, 2)), PageForm("b", 4, 1)),
        GroupPair(PageForm("a", 4, 1), PageForm("b", 4, 1, TokenClass(2, -1))),
        GroupPair(PageForm("a", 4, 1, TokenClass(0, 0)), PageForm("b", 4, 1)),
        GroupPair(PageForm("a", 4, 1), PageForm("b", 4, 1, TokenClass(2**31 - 1, 0))),
        GroupPair(PageForm("a", 4, 1, TokenClass(2, 0, -4)), PageForm("b", 4, 1)),
        GroupPair(PageForm("a", 0, 1, TokenClass(2, 0)), PageForm("b", 0, 1)),
    ],
)
def test_lists_that_do_not_go_together_are_refused(pair: GroupPair) -> None:
    program = _program(Strategy.SLICES)
    with pytest.raises(ProgramInvalidError, match="groups a and b"):
        CheckedProgram(replace(program, group_pairs=(pair,)))


def test_an_order_for_more_descriptors_than_fit_is_refused_before_they_are_made() -> None:
    checked = _check(_program(Strategy.SLICES))
    for _ in range(2):
        checked.check_size(TokenRange(0, 21))
        with pytest.raises(OrderTooLargeError):
            checked.check_size(TokenRange(0, 2**31 - 1))


@pytest.mark.parametrize("strategy", [Strategy.SLICES, Strategy.WHOLE, Strategy.PACK])
@pytest.mark.parametrize(
    "cuts", [((8, 1), (8, 1)), ((8, 16), (1, 1)), ((1, 1), (8, 4)), ((4, 2), (8, 8))]
)
def test_as_many_descriptors_are_expected_as_binding_makes_at_least(
    cuts: tuple[tuple[int, int], ...], strategy: Strategy
) -> None:
    # Ranks share the tokens out. If many more were expected, long prompts would be refused.
    model = ModelSpec("m", (MlaSpec(0, 8, DType.BFLOAT16),))
    settings = [
        EngineSettings(tp=dcp, dcp=dcp, interleave_tokens=run, page_tokens=16) for dcp, run in cuts
    ]
    plan = make_plan(*(build_layout(model, one) for one in settings))
    for tokens in (TokenRange(0, 1), TokenRange(3, 700), TokenRange(0, 5000)):
        count, blocks = tokens.stop - tokens.start, Blocks({"attention": np.arange(1, 400)})
        memory = RegionTable(*(np.full(64, n, np.int64) for n in (1 << 20, 256, 1 << 20)))
        for program in compile_programs(plan, strategy):
            checked = CheckedProgram(program)
            for step in program.steps:
                told = checked._descriptors(step, count)
                src, dst = (paged(memory, side, blocks) for side in (SRC, DST))
                if step.form == READ_SPANS:
                    pair = [program.group_pairs[row] for row in step.rows[:, Column.GROUP_PAIR]]
                    made = sum(len(one.src_pages(tokens.start, tokens.stop)) for one in pair)
                else:
                    made = len(bind_copies(step.rows, program.group_pairs, src, dst, tokens))
                assert made <= told
                if step.form == READ_PAGES:
                    assert told <= 5 * made + 8 * len(step.rows)


def test_every_source_rank_is_held_to_its_own_pages() -> None:
    program = _program(Strategy.SLICES)
    rows = program.rows(READ_PAGES, 0)
    other = rows.copy()
    other[:, Column.SRC_RANK] = 1
    checked = CheckedProgram(with_rows(program, READ_PAGES, np.concatenate([rows, other])))
    short = tuple(1 for _ in SRC_STRIDES)

    checked.check_source(0, SRC_STRIDES)
    with pytest.raises(ProgramInvalidError, match="leaves its source page"):
        checked.check_source(1, short)
    checked.check_source(2, short)  # has no rows


# -- products that would leave their memory, and rows that would write weights -------------------


MIXING = make_case("recompute")
CONSTANT = tuple(region.constant for region in MIXING.destination.ranks[0].regions)
WEIGHTS = CONSTANT.index(True)


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


WRONG_PRODUCT: Mapping[ProjectColumn, tuple[int, ...]] = {
    ProjectColumn.TAPS: (0, 4),
    ProjectColumn.HIDDEN: (0, 25),
    ProjectColumn.CHANNELS: (0,),
    ProjectColumn.SPAN: (99,),
    ProjectColumn.SRC_OFFSET_BYTES: (2, 1),
    ProjectColumn.SRC_TAP_STRIDE_BYTES: (0, 50),
    ProjectColumn.DTYPE: (DType.UINT8, 8, DType.FLOAT32),
    ProjectColumn.DST_DTYPE: (DType.FLOAT8_E4M3FN,),
    ProjectColumn.WEIGHT_REGION: (0,),
    ProjectColumn.WEIGHT_OFFSET_BYTES: (2,),
    ProjectColumn.WEIGHT_STRIDE_BYTES: (50,),
    ProjectColumn.GROUP_PAIR: (99,),
    ProjectColumn.DST_REGION: (WEIGHTS,),
    ProjectColumn.DST_OFFSET_BYTES: (1,),
    ProjectColumn.DST_STRIDE_BYTES: (0, 1 << 20),
    ProjectColumn.DST_TAP_STRIDE_BYTES: (1 << 20,),
}


@pytest.mark.parametrize(
    ("column", "value"),
    [
        (column, value)
        for column in ProjectColumn
        for value in (-1, HUGE, *WRONG_PRODUCT.get(column, ()))
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
