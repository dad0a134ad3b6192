"""What D rebuilds instead of reading it: when it can, when it pays, and what it reads for it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from restow.broker.draw.explain import explain
from restow.broker.draw.layer_pages import Content
from restow.broker.draw.picture import make_picture
from restow.broker.errors import ModelMismatchError, StrategyRefusedError
from restow.broker.families import (
    AttentionSpec,
    ConvLayout,
    EngineSettings,
    Mamba2Spec,
    Mixer,
    ModelSpec,
    build_layout,
)
from restow.broker.layout import DType, Layout
from restow.broker.layout.difference import field_class
from restow.broker.planner import CostModel, Strategy, compile_programs, make_plan
from restow.broker.planner.compile import Cost, draft_programs
from restow.broker.planner.program import PROJECT_SPANS, READ_SPANS, Column, ProjectColumn
from restow.broker.planner.recompute import Rebuilt

BF16, F16, F32 = DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32
NANO = Mamba2Spec(0, 64, 64, 128, 8, 4, BF16, F32, Mixer(2688, BF16))
ATTENTION = AttentionSpec(1, 2, 128, BF16)
MODEL = ModelSpec("nano", (NANO, ATTENTION, replace(NANO, layer=2)))


def side(tp: int = 1, model: ModelSpec = MODEL, **settings: Any) -> Layout:
    return build_layout(model, replace(EngineSettings(tp=tp), **settings))


def typed(conv: DType, weights: DType) -> ModelSpec:
    own = replace(NANO, conv_dtype=conv, mixer=Mixer(2688, weights))
    return ModelSpec("nano", (own,))


CONV = {"conv.x", "conv.B", "conv.C"}
P, D = side(mixer_inputs=True), side(projections=True)


@pytest.mark.parametrize(
    ("source", "destination", "why"),
    [
        (side(), D, "P keeps no mixer inputs"),
        (P, side(), "D offers no in-projection weights"),
        (side(), side(), "P keeps no mixer inputs and D offers no in-projection weights"),
        (
            side(model=typed(F32, F32), mixer_inputs=True),
            side(model=typed(F32, BF16), projections=True),
            "P's inputs are float32, but D's weights are bfloat16",
        ),
        (
            side(model=typed(BF16, F32), mixer_inputs=True),
            side(model=typed(F32, F32), projections=True),
            "P stores the float32 product as bfloat16, but D as float32",
        ),
    ],
)
def test_what_is_missing_is_named(source: Layout, destination: Layout, why: str) -> None:
    with pytest.raises(StrategyRefusedError, match=f"conv window can be recomputed at D: .*{why}"):
        compile_programs(make_plan(source, destination), Strategy.RECOMPUTE)


@pytest.mark.parametrize(
    ("conv", "d_conv", "weights"), [(BF16, BF16, F32), (F32, BF16, F32), (F32, F16, BF16)]
)
def test_types_that_give_what_p_would_have_sent(conv: DType, d_conv: DType, weights: DType) -> None:
    source = side(model=typed(conv, weights), mixer_inputs=True)
    destination = side(model=typed(d_conv, weights), projections=True)
    (program,) = compile_programs(make_plan(source, destination), Strategy.RECOMPUTE)
    assert set(program.rows(PROJECT_SPANS)[:, ProjectColumn.DST_DTYPE]) == {d_conv}


def test_inputs_of_another_shape_are_another_model() -> None:
    other = ModelSpec("nano", (replace(NANO, mixer=Mixer(4096, BF16)),))
    wide = side(model=other, projections=True)
    with pytest.raises(
        ModelMismatchError, match=r"input layers\.0\.mixer_input: P has .* hidden 2688"
    ):
        make_plan(side(model=ModelSpec("nano", (NANO,)), mixer_inputs=True), wide)


@pytest.mark.parametrize("conv_layout", list(ConvLayout))
def test_x_b_and_c_are_one_product(conv_layout: ConvLayout) -> None:
    destination = side(4, projections=True, conv_layout=conv_layout)
    for program in compile_programs(make_plan(P, destination), Strategy.RECOMPUTE):
        assert (
            program.rows(PROJECT_SPANS)[:, ProjectColumn.CHANNELS].tolist() == [1024 + 2 * 256] * 2
        )
        assert program.rows(PROJECT_SPANS)[:, ProjectColumn.TAPS].tolist() == [3, 3]


@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 1), (2, 4), (4, 2), (8, 1)])
def test_inputs_are_read_whole_from_one_replica_by_turns(p_tp: int, d_tp: int) -> None:
    """Check that bytes are those of the formula, and no replica serves more than its share."""
    source, destination = side(p_tp, mixer_inputs=True), side(d_tp, projections=True)
    plan = make_plan(source, destination)
    served: Counter[int] = Counter()
    for program, lines in zip(
        compile_programs(plan, Strategy.RECOMPUTE),
        explain(plan, Strategy.RECOMPUTE, tokens=1),
        strict=True,
    ):
        spans = program.rows(READ_SPANS)[program.rows(PROJECT_SPANS)[:, ProjectColumn.SPAN]]
        assert (spans[:, Column.COUNT] == 3 * 2688 * 2).all()
        (rank,) = set(spans[:, Column.SRC_RANK].tolist())
        served[rank] += 1
        windows = 2 * 3 * (64 * 64 + 2 * 8 * 128) * 2 // d_tp
        sent = plan_bytes(plan, program.dst_rank)
        assert lines.bytes == sent - windows + 2 * 3 * 2688 * 2
        assert lines.strategy["conv.x"] == lines.strategy["conv.C"] == "recompute"
        assert lines.bytes == sum(lines.bytes_from.values())
        assert lines.cost == lines.cost_by_strategy[Strategy.RECOMPUTE]
    assert max(served.values()) <= -(-d_tp // p_tp)


def plan_bytes(plan: Any, rank: int) -> int:
    return sum(move.bytes for move in plan.moves if move.dst_rank == rank)


def test_auto_rebuilds_when_weights_cost_less_than_the_wire() -> None:
    plan = make_plan(P, D)
    (sent,) = compile_programs(plan)
    assert not len(sent.rows(PROJECT_SPANS))
    free = CostModel(seconds_per_weight_byte=0.0, read_bytes_per_second=1e6)
    (rebuilt,) = compile_programs(plan, costs=free)
    assert len(rebuilt.rows(PROJECT_SPANS))
    # A quarter of the channels is less than the inputs: then not even free weights help.
    for program in compile_programs(make_plan(P, side(4, projections=True)), costs=free):
        assert not len(program.rows(PROJECT_SPANS))


def test_a_rank_without_weights_is_sent_its_windows() -> None:
    destination = side(2, projections=True)
    idle = replace(destination.ranks[1], projections=(), regions=destination.ranks[1].regions)
    mixed = replace(destination, ranks=(destination.ranks[0], idle))
    one, other = compile_programs(make_plan(P, mixed), Strategy.RECOMPUTE)
    assert len(one.rows(PROJECT_SPANS))
    assert not len(other.rows(PROJECT_SPANS))
    first, second = explain(make_plan(P, mixed), Strategy.RECOMPUTE)
    assert first.strategy["conv.x"] == "recompute" != second.strategy["conv.x"]


def test_numbers_at_odd_places_are_sent() -> None:
    spec = ModelSpec("odd", (replace(NANO, heads=8, head_dim=1, state=1, groups=1),))
    destination = side(model=spec, projections=True)
    region = replace(destination.ranks[0].regions[0], page_stride_bytes=1001)
    rank = replace(destination.ranks[0], regions=(region, *destination.ranks[0].regions[1:]))
    plan = make_plan(side(model=spec, mixer_inputs=True), replace(destination, ranks=(rank,)))
    with pytest.raises(StrategyRefusedError, match="not aligned to their 2 bytes"):
        compile_programs(plan, Strategy.RECOMPUTE)


def test_refusals_are_shown_beside_what_the_other_strategies_cost() -> None:
    (lines,) = explain(make_plan(side(), D))
    assert "P keeps no mixer inputs" in str(lines.cost_by_strategy[Strategy.RECOMPUTE])
    assert isinstance(lines.cost_by_strategy[Strategy.AUTO], Cost)


def test_a_picture_shows_inputs_and_no_move_of_what_is_rebuilt() -> None:
    plan = make_plan(P, side(2, projections=True, mixer_inputs=True))
    ranks = explain(plan, Strategy.RECOMPUTE, tokens=1)
    states, _ = make_picture(plan, ranks, 1).panels
    assert {name for name, way in states.ways.items() if way == "recompute"} == CONV
    assert {field_class(move.field) for move in states.shown.moves} == {"ssm"}
    assert sum(read.bytes for read in states.shown.inputs) == 2 * 3 * 2688 * 2
    *_, said = states.remarks
    assert said == "Rebuilt on D from 16,128 bytes of mixer inputs: conv.x, conv.B and conv.C."
    for rank in (*states.shown.source, *states.shown.destination):
        (page,) = rank.pages
        kept = [cell.bytes for cell in page.cells if cell.content is Content.INPUTS]
        assert sum(kept) == 3 * 2688 * 2
    plain = make_picture(plan, explain(plan, tokens=1), 1).panels[0]
    assert {field_class(move.field) for move in plain.shown.moves} == {*CONV, "ssm"}


def test_weights_are_weighed_once_a_rank() -> None:
    # If recompute is forced, the expected time includes the products; all else goes auto's way.
    plan = make_plan(P, D)
    (draft,) = draft_programs(plan, Strategy.RECOMPUTE)[1]
    weights = 2 * (64 * 64 + 2 * 8 * 128) * 2688 * 2
    assert Rebuilt.among(draft.shares).weight_bytes == weights
    (lines,) = explain(plan, Strategy.RECOMPUTE)
    (free,) = explain(plan, Strategy.RECOMPUTE, costs=CostModel(seconds_per_weight_byte=0.0))
    expected = weights * CostModel().seconds_per_weight_byte
    assert lines.cost.seconds - free.cost.seconds == pytest.approx(expected)
    (auto,) = explain(plan)
    assert lines.strategy["ssm"] == auto.strategy["ssm"]


def test_programs_are_the_same_in_every_process() -> None:
    one, two = (compile_programs(make_plan(P, D), Strategy.RECOMPUTE)[0] for _ in range(2))
    assert one.program_id == two.program_id
    assert np.array_equal(one.rows(PROJECT_SPANS), two.rows(PROJECT_SPANS))
    assert one.program_id != compile_programs(make_plan(P, D), Strategy.AUTO)[0].program_id


def test_windows_that_are_sent_may_be_interleaved() -> None:
    # One rank of D rebuilds; for the others P permutes its windows in one launch.
    destination = side(4, projections=True, conv_layout=ConvLayout.DS)
    first, *others = destination.ranks
    ranks = (first, *(replace(rank, projections=()) for rank in others))
    plan = make_plan(P, replace(destination, ranks=ranks))
    costs = CostModel(seconds_per_descriptor=1.0, seconds_per_stage=0.0)
    one, *rest = compile_programs(plan, Strategy.RECOMPUTE, costs)
    assert len(one.rows(PROJECT_SPANS))
    for program in rest:
        assert not len(program.rows(PROJECT_SPANS))
        assert program.interleaving_ranks == (0,)


def test_rebuilding_is_priced_where_inputs_have_a_list_of_their_own() -> None:
    # No other way reads by the list of the inputs.
    (rank,) = P.ranks
    region = replace(rank.regions[0], name="inputs", group="inputs")
    inputs = tuple(replace(one, region="inputs") for one in rank.inputs[:1])
    fields = replace(P.model, inputs=P.model.inputs[:1])
    apart = replace(rank, regions=(*rank.regions, region), inputs=inputs)
    plan = make_plan(Layout(fields, (apart,)), D)
    (slices,), (rebuilding,) = (explain(plan, one) for one in (Strategy.SLICES, Strategy.RECOMPUTE))
    assert slices.cost_by_strategy[Strategy.RECOMPUTE] == rebuilding.cost
