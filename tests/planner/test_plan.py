"""What can't be planned, and plans that hostile layouts would blow up."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from laws.strategies import SENDING
from restow.agents.binding.pages import Blocks, RegionTable, TokenRange
from restow.agents.binding.reads import Reads
from restow.broker.errors import (
    CastUnsupportedError,
    ModelMismatchError,
    PlanError,
    StrategyRefusedError,
    TooManyPiecesError,
)
from restow.broker.families import (
    AttentionSpec,
    ConvLayout,
    EngineSettings,
    KvOrder,
    Mamba2Spec,
    ModelSpec,
    build_layout,
)
from restow.broker.families.specs import LayerSpec
from restow.broker.layout import (
    DType,
    Field,
    Kind,
    Layout,
    Model,
    RankLayout,
    Region,
    Shard,
    Span,
    check_layout,
)
from restow.broker.planner import Strategy, compile_programs, early_plan, make_plan
from restow.broker.planner.costs import CostModel, descriptors, row_costs
from restow.broker.planner.program import (
    GATHER_IN_ORDER,
    READ_PAGES,
    READ_SPANS,
    SCATTER_SPANS,
    Column,
)

BF16, F32 = DType.BFLOAT16, DType.FLOAT32
MAMBA = Mamba2Spec(0, 8, 4, 8, 2, 4, BF16, F32)
ATTENTION = AttentionSpec(1, 4, 8, BF16)
MODEL = ModelSpec("m", (MAMBA, ATTENTION))
ONE = build_layout(MODEL, EngineSettings())


def snapshot(shape: tuple[int, ...], strides: tuple[int, ...], dtype: DType, page: int) -> Layout:
    """Return a layout of one rank that holds one field."""
    axes = tuple(f"axis{index}" for index in range(len(shape)))
    box = tuple(Span(0, size) for size in shape)
    rank = RankLayout(
        0, (Region("r", "g", page, None),), (Shard("f", box, dtype, "r", 0, strides),)
    )
    layout = Layout(Model("m", (Field("f", Kind.SNAPSHOT, axes, shape),)), (rank,))
    check_layout(layout)
    return layout


def test_tokens_may_be_read_early_and_snapshots_not() -> None:
    plan = make_plan(ONE, build_layout(MODEL, EngineSettings(tp=2)))
    early = early_plan(plan)
    assert early is not None
    kinds = {field.name: field.kind for field in ONE.model.fields}
    of_tokens = tuple(move for move in plan.moves if kinds[move.field] is Kind.PER_TOKEN)
    assert early.moves == of_tokens
    assert 0 < len(of_tokens) < len(plan.moves)
    window = replace(MODEL, layers=(MAMBA, replace(ATTENTION, window_tokens=8)))
    windowed = build_layout(window, EngineSettings())
    assert early_plan(make_plan(windowed, windowed)) is None


def test_another_model() -> None:
    other = build_layout(replace(MODEL, name="n"), EngineSettings())
    with pytest.raises(ModelMismatchError, match=r"P serves model 'm' \(.*, but D serves 'n' \("):
        make_plan(ONE, other)


@pytest.mark.parametrize(
    ("layers", "field", "message"),
    [
        ((MAMBA,), "layers.1.k", "D has none"),
        ((replace(MAMBA, layer=7), ATTENTION), "layers.0.conv.B", "D has none"),
        (
            (MAMBA, replace(ATTENTION, kv_heads=8)),
            "layers.1.k",
            "P has per_token, head 4, dim 8, D has per_token, head 8, dim 8",
        ),
        ((MAMBA, replace(ATTENTION, window_tokens=16)), "layers.1.k", "D has .* window of 16"),
    ],
)
def test_another_shape_of_the_model(
    layers: tuple[LayerSpec, ...], field: str, message: str
) -> None:
    other = build_layout(ModelSpec("m", layers), EngineSettings())
    with pytest.raises(ModelMismatchError, match=message) as caught:
        make_plan(ONE, other)
    assert caught.value.subject["field"] == field
    assert (caught.value.status, caught.value.reason) == ("FAILED_PRECONDITION", "MODEL_MISMATCH")


def test_a_source_with_a_hole_is_noticed_though_it_was_never_checked() -> None:
    (rank,) = ONE.ranks
    holed = replace(ONE, ranks=(replace(rank, shards=rank.shards[1:]),))
    with pytest.raises(PlanError, match=r"layers\.0\.conv\.x: the source holds 0 of the 96"):
        make_plan(holed, ONE)


def test_a_cast_that_does_not_exist() -> None:
    attention = replace(ATTENTION, dtype=DType.FLOAT8_E4M3FN)
    other = build_layout(ModelSpec("m", (MAMBA, attention)), EngineSettings())
    with pytest.raises(CastUnsupportedError, match="float8_e4m3fn, and no cast exists") as caught:
        make_plan(ONE, other)
    assert caught.value.subject == {"field": "layers.1.k", "ranks": "0,0"}


def test_a_cast_of_elements_that_lie_askew() -> None:
    askew = snapshot((3, 2), (9, 4), F32, 64)
    straight = snapshot((3, 2), (4, 2), BF16, 12)
    for pair in ((askew, straight), (straight, askew)):
        plan = make_plan(*pair)
        with pytest.raises(CastUnsupportedError, match="not aligned to their size"):
            compile_programs(plan, Strategy.PACK)


def test_slices_can_not_cast() -> None:
    mamba = replace(MAMBA, ssm_dtype=BF16)
    other = build_layout(ModelSpec("m", (mamba, ATTENTION)), EngineSettings())
    plan = make_plan(ONE, other)
    with pytest.raises(StrategyRefusedError, match="slices cannot convert float32 to bfloat16"):
        compile_programs(plan, Strategy.SLICES)
    (program,) = compile_programs(plan, Strategy.AUTO)
    assert (program.rows(SCATTER_SPANS)[:, Column.SRC_DTYPE] == F32).any()


def test_a_rank_without_shards_has_an_empty_program() -> None:
    idle = replace(ONE, ranks=(*ONE.ranks, RankLayout(5, (), ())))
    for strategy in SENDING:
        first, second = compile_programs(make_plan(ONE, idle), strategy)
        assert first.src_ranks == (0,)
        assert second.dst_rank == 5
        assert second.src_ranks == second.staging_ranks == ()
        assert first.group_pairs == second.group_pairs


def test_equal_names_of_programs_mean_equal_rows() -> None:
    plan = make_plan(ONE, build_layout(MODEL, EngineSettings(tp=2, conv_layout=ConvLayout.DS)))
    free = CostModel(seconds_per_descriptor=1.0, seconds_per_stage=0.0)
    programs = [
        *compile_programs(plan),
        *compile_programs(plan, costs=free),
        *(p for strategy in SENDING for p in compile_programs(plan, strategy)),
    ]
    by_name: dict[str, tuple[bytes, ...]] = {}
    for program in programs:
        rows = tuple(step.rows.tobytes() for step in program.steps)
        assert by_name.setdefault(program.program_id, rows) == rows
    assert len(set(by_name.values())) == len(by_name)


def test_auto_takes_small_pieces_out_of_a_span_and_reads_large_ones() -> None:
    spec = ModelSpec("m", (Mamba2Spec(0, 64, 64, 128, 8, 4, BF16, F32),))
    source = build_layout(spec, EngineSettings())
    destination = build_layout(spec, EngineSettings(conv_layout=ConvLayout.DS))
    (program,) = compile_programs(make_plan(source, destination))
    assert (program.rows(SCATTER_SPANS)[:, Column.SRC_DTYPE] == BF16).all()
    (span,) = program.rows(READ_SPANS)
    assert span[Column.COUNT] == (64 * 64 + 2 * 8 * 128) * 3 * 2
    (ssm,) = program.rows(READ_PAGES)
    assert ssm[Column.COUNT] == 64 * 64 * 128 * 4


def test_auto_packs_small_pieces_that_lie_far_apart() -> None:
    layers = tuple(AttentionSpec(layer, 64, 128, BF16) for layer in range(4))
    spec = ModelSpec("m", layers)
    source = build_layout(spec, EngineSettings(kv_order=KvOrder.NHD))
    destination = build_layout(spec, EngineSettings(tp=64, kv_order=KvOrder.NHD))
    for program in compile_programs(make_plan(source, destination)):
        assert len(program.rows(GATHER_IN_ORDER)) == len(layers)
        assert not len(program.rows(READ_PAGES))
        assert not len(program.rows(READ_SPANS))


@pytest.mark.parametrize("pages", [(16, 16), (16, 24), (5, 3), (1, 4)])
def test_costs_count_the_stretches_of_unequal_pages(pages: tuple[int, int]) -> None:
    spec = ModelSpec("m", (AttentionSpec(0, 1, 8, BF16),))
    source, destination = (build_layout(spec, EngineSettings(page_tokens=n)) for n in pages)
    (program,) = compile_programs(make_plan(source, destination), Strategy.SLICES)
    tokens = 97
    edges = {t for t in range(tokens) if t % pages[0] == 0 or t % pages[1] == 0}
    pieces, sizes = row_costs(program.rows(READ_PAGES), program.group_pairs, tokens)
    assert pieces.tolist() == [len(edges)]
    assert sizes.tolist() == [tokens * 32]


@pytest.mark.parametrize(("tokens", "counts"), [(64, 4), (72, 4 + 8), (7, 8)])
def test_heads_that_follow_each_other_in_a_page_are_one_descriptor(
    tokens: int, counts: int
) -> None:
    # This holds in a whole page; in a page that is not full, each head's tokens end apart.
    spec = ModelSpec("m", (AttentionSpec(0, 8, 8, BF16),))
    layout = build_layout(spec, EngineSettings(page_tokens=16))
    plan = make_plan(layout, layout)
    (program,) = compile_programs(plan, Strategy.SLICES)
    assert len(program.rows(READ_PAGES)) == 8
    found = descriptors(program.rows(READ_PAGES), program.group_pairs, tokens)
    assert found.sum() == pytest.approx(counts)
    assert len(set(found.tolist())) == 1
    pages = np.arange(2 * -(-tokens // 16))[::2]  # none beside another
    memory = RegionTable(np.array([4096]), np.array([4096]), np.array([64]))
    blocks = Blocks({"attention": pages})
    laid = Reads.of(program.rows(READ_PAGES), program.group_pairs, memory, memory)
    bound = laid.bind(blocks, blocks, TokenRange(0, tokens))
    assert len(bound.length_bytes) == counts


def test_auto_reads_equal_pages_in_place() -> None:
    # A page of many heads needs one descriptor, whatever a descriptor costs.
    spec = ModelSpec("m", (AttentionSpec(0, 8, 128, BF16),))
    layout = build_layout(spec, EngineSettings(page_tokens=16))
    costs = CostModel(seconds_per_descriptor=6e-6, copy_bytes_per_second=12e9)
    (program,) = compile_programs(make_plan(layout, layout), costs=costs)
    assert len(program.rows(READ_PAGES)) == 8
    assert not len(program.rows(READ_SPANS))


def transposed() -> tuple[Layout, Layout]:
    """Return two layouts with six axes of 64 in opposite orders: 2^36 single elements."""
    strides = tuple(64**power for power in range(6))
    shape = (64,) * 6
    return (
        snapshot(shape, strides, DType.UINT8, 64**6),
        snapshot(shape, strides[::-1], DType.UINT8, 64**6),
    )


def many_boxes() -> tuple[Layout, Layout]:
    """Return two layouts of 4,096 strips; each strip of a layout crosses all of the other."""

    def strips(axis: int) -> Layout:
        shards = []
        for index in range(4096):
            box = [Span(0, 4096), Span(0, 4096)]
            box[axis] = Span(index, index + 1)
            strides = (1, 4096)
            shards.append(
                Shard("f", tuple(box), DType.UINT8, "r", index * strides[axis], (1, 4096))
            )
        field = Field("f", Kind.SNAPSHOT, ("a", "b"), (4096, 4096))
        rank = RankLayout(0, (Region("r", "g", 4096**2, None),), tuple(shards))
        return Layout(Model("m", (field,)), (rank,))

    return strips(0), strips(1)


@pytest.mark.parametrize("make", [transposed, many_boxes])
def test_hostile_pairs_cost_neither_memory_nor_time(
    make: Callable[[], tuple[Layout, Layout]],
) -> None:
    source, destination = make()
    tracemalloc.start()
    began = time.process_time()
    try:
        with pytest.raises(TooManyPiecesError) as caught:
            compile_programs(make_plan(source, destination))
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.status == "RESOURCE_EXHAUSTED"
    assert time.process_time() - began < 20
    assert peak_bytes < 400e6


def test_slices_of_too_many_single_elements_are_refused() -> None:
    source = snapshot((2048, 2048), (2048, 1), DType.UINT8, 2048**2)
    destination = snapshot((2048, 2048), (1, 2048), DType.UINT8, 2048**2)
    plan = make_plan(source, destination)
    with pytest.raises(TooManyPiecesError, match="use pack or auto"):
        compile_programs(plan, Strategy.SLICES)
    (program,) = compile_programs(plan, Strategy.AUTO)
    assert len(program.rows(SCATTER_SPANS)) == 2048
    assert len(program.rows(READ_SPANS)) == 1


def test_planning_large_models_takes_a_moment() -> None:
    # The layers are Falcon-H1's 72 + 72, TP 2 to 4 (docs/benchmarks.md has the numbers).
    layers = [
        spec
        for i in range(72)
        for spec in (AttentionSpec(i, 4, 128, BF16), Mamba2Spec(i, 32, 128, 256, 2, 4, BF16, BF16))
    ]
    source, destination = (
        build_layout(ModelSpec("falcon", tuple(layers)), EngineSettings(tp=tp)) for tp in (2, 4)
    )
    times = []
    for _ in range(3):
        began = time.process_time()
        programs = compile_programs(make_plan(source, destination))
        times.append(time.process_time() - began)
    assert min(times) < 1
    assert all(np.array_equal(p.src_ranks, [i // 2]) for i, p in enumerate(programs))
