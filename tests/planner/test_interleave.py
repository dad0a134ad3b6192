"""A chunk has the order that is promised, and states go through it when that costs less."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from restow.broker.errors import StrategyRefusedError
from restow.broker.families import (
    AttentionSpec,
    ConvLayout,
    EngineSettings,
    Mamba2Spec,
    ModelSpec,
    build_layout,
)
from restow.broker.layout import DType, Layout
from restow.broker.planner import Program, Strategy, compile_programs, make_plan
from restow.broker.planner.costs import CostModel
from restow.broker.planner.program import (
    GATHER_IN_ORDER,
    GATHER_PLACED,
    INTERLEAVED_TO,
    SCATTER_PLACED,
    Column,
    chunk_bytes,
)
from restow.broker.planner.table import RowTable
from restow.broker.planner.ways import chunk_places, whole_moves
from restow.broker.rpc import wire_program

BF16 = DType.BFLOAT16
ATTENTION = AttentionSpec(1, 4, 8, BF16)
MAMBA = Mamba2Spec(0, 4, 1, 2, 2, 3, BF16, BF16)
"""Four channels of x, two groups of two channels each in B and in C, two taps."""


def layout(tp: int, conv: ConvLayout, *layers: Mamba2Spec | AttentionSpec) -> Layout:
    return build_layout(ModelSpec("m", layers or (MAMBA,)), EngineSettings(tp=tp, conv_layout=conv))


def columns(program: Program, channels: int) -> list[str]:
    """Return the chunk's content, element by element: the column's name, and a dash for each tap.

    ``channels`` are those of a rank of the source; its window is ``[tap][x | B | C]``.
    """
    chunk = [""] * (chunk_bytes(program.rows(GATHER_PLACED), INTERLEAVED_TO) // 2)
    names = [f"x{i}" for i in range(4)] + [f"{part}{i}" for part in "BC" for i in range(4)]
    for row in program.rows(GATHER_PLACED):
        item = 1 if row[Column.SRC_DTYPE] == DType.UINT8 else 2
        for index in range(0, int(row[Column.COUNT]), 2 // item):
            src = int(row[Column.SRC_OFFSET_BYTES] + index * row[Column.SRC_STEP_BYTES]) // 2
            dst = int(row[Column.DST_OFFSET_BYTES] + index * row[Column.DST_STEP_BYTES]) // 2
            tap, column = divmod(src, channels)
            chunk[dst] = names[column] + "'" * tap if tap < 2 else "s"
    return chunk


@pytest.mark.parametrize("ssm", [BF16, DType.FLOAT32])
def test_every_field_of_a_chunk_begins_where_any_element_may_lie(ssm: DType) -> None:
    # Three channels with one tap are six bytes: the next field must not begin there.
    odd = Mamba2Spec(0, 3, 1, 3, 1, 2, BF16, ssm)
    moves = make_plan(layout(1, ConvLayout.SD, odd), layout(1, ConvLayout.DS, odd)).moves
    places = chunk_places(moves)
    assert [place.offset_bytes for place in places] == [0, 16, 32, 48]
    assert any(np.prod([span.size for span in move.box]) * 2 % 16 for move in moves)


def test_a_chunk_is_one_readers_channels_each_with_its_taps() -> None:
    plan = make_plan(layout(1, ConvLayout.SD), layout(2, ConvLayout.DS))
    first, second = compile_programs(plan, Strategy.INTERLEAVE)
    assert {step.form for step in first.steps} == {GATHER_PLACED, SCATTER_PLACED}
    conv = [name for name in columns(second, 12) if name and name != "s"]
    assert conv == "x2 x2' x3 x3' B2 B2' B3 B3' C2 C2' C3 C3'".split()  # noqa: SIM905
    assert columns(first, 12)[:4] == ["x0", "x0'", "x1", "x1'"]


def test_the_order_says_nothing_of_the_sides_layouts() -> None:
    orders = []
    for conv in ConvLayout:
        plan = make_plan(layout(1, conv), layout(2, conv))
        program = compile_programs(plan, Strategy.INTERLEAVE)[0]
        orders.append(chunk_bytes(program.rows(SCATTER_PLACED)))
    assert orders[0] == orders[1]


def test_tokens_are_packed_behind_the_chunk() -> None:
    layers = (MAMBA, ATTENTION)
    plan = make_plan(layout(2, ConvLayout.SD, *layers), layout(4, ConvLayout.DS, *layers))
    for program in compile_programs(plan, Strategy.INTERLEAVE):
        forms = {step.form for step in program.steps}
        assert forms == {GATHER_PLACED, GATHER_IN_ORDER, SCATTER_PLACED}
        assert program.staging_ranks == program.interleaving_ranks == (program.dst_rank // 2,)


@pytest.mark.parametrize("strategy", [one for one in Strategy if one is not Strategy.RECOMPUTE])
def test_a_programs_size_counts_every_table_that_travels(strategy: Strategy) -> None:
    # By that size the broker keeps a batch below what one message may be.
    layers = (replace(MAMBA, heads=64, head_dim=8), ATTENTION)
    plan = make_plan(layout(1, ConvLayout.SD, *layers), layout(2, ConvLayout.DS, *layers))
    for program in compile_programs(plan, strategy):
        for part in (None, *program.staging_ranks):
            message = wire_program.program_to_proto(program, part)
            assert message.ByteSize() <= program.size_bytes + 512


def test_nothing_to_interleave_is_refused() -> None:
    one = layout(1, ConvLayout.SD, ATTENTION)
    with pytest.raises(StrategyRefusedError, match="no snapshot is moved: use pack"):
        compile_programs(make_plan(one, one), Strategy.INTERLEAVE)


@pytest.mark.parametrize(("d_tp", "interleaves"), [(1, False), (2, True)])
def test_auto_interleaves_for_several_readers(d_tp: int, interleaves: bool) -> None:
    # Descriptors cost so much here that all is gathered, and launches cost more than copies.
    plan = make_plan(layout(1, ConvLayout.SD), layout(d_tp, ConvLayout.DS))
    costs = CostModel(seconds_per_descriptor=1.0, seconds_per_stage=0.0)
    for program in compile_programs(plan, costs=costs):
        assert bool(len(program.rows(GATHER_PLACED))) == interleaves
        assert bool(len(program.rows(GATHER_IN_ORDER))) != interleaves


def test_a_move_goes_through_a_chunk_whole_or_not_at_all() -> None:
    # Move 1 shares a row with move 0, which has another row that is left out.
    none = np.zeros((0, len(Column)), np.int64)
    piece_move, piece_row = np.array([0, 0, 1, 1, 2]), np.array([0, 1, 1, 2, 3])
    table = RowTable(none, none, piece_move, piece_row)
    assert whole_moves(table, np.array([False, True, True, True])).tolist() == [False, False, True]
    assert whole_moves(table, np.ones(4, bool)).all()
