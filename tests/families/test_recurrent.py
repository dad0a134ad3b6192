"""The pages of every recurrent family, against vLLM's shapes (`mamba_utils.py`)."""

from __future__ import annotations

import pytest

from restow.broker.errors import TpSizeError
from restow.broker.families import (
    ConvLayout,
    EngineSettings,
    GdnSpec,
    KdaSpec,
    LinearAttentionSpec,
    Mamba1Spec,
    Mamba2Spec,
    MatrixOrder,
    MlaSpec,
    ModelSpec,
    RecurrentSpec,
    ShortConvSpec,
    build_layout,
)
from restow.broker.layout import DType, RankLayout, Shard, check_layout

BF16, F32 = DType.BFLOAT16, DType.FLOAT32
EXTRA = 2

CASES: list[tuple[RecurrentSpec, int, int, int]] = [
    # spec, TP, columns of the conv state on a rank, elements of its states there
    (Mamba1Spec(0, 8192, 16, 4, BF16, F32), 4, 8192 // 4, 8192 // 4 * 16),
    (Mamba2Spec(0, 64, 64, 128, 8, 4, BF16, F32), 4, (4096 + 2 * 8 * 128) // 4, 16 * 64 * 128),
    (Mamba2Spec(0, 128, 64, 128, 1, 4, BF16, F32), 4, 8192 // 4 + 2 * 128, 32 * 64 * 128),
    (GdnSpec(0, 16, 32, 128, 128, 4, BF16, BF16), 4, (2 * 2048 + 4096) // 4, 8 * 128 * 128),
    (GdnSpec(0, 4, 8, 16, 32, 4, BF16, BF16), 2, (2 * 64 + 256) // 2, 4 * 32 * 16),
    (KdaSpec(0, 32, 128, 4, BF16, F32), 8, 3 * 32 * 128 // 8, 4 * 128 * 128),
    (ShortConvSpec(0, 2048, 3, BF16), 2, 1024, 0),
    (ShortConvSpec(0, 2048, 3, BF16, replicated=True), 2, 2048, 0),
    (LinearAttentionSpec(0, 16, 32, F32), 4, 0, 4 * 32 * 32),
]


def rank_of(spec: RecurrentSpec | MlaSpec, settings: EngineSettings) -> RankLayout:
    layout = build_layout(ModelSpec("m", (spec,)), settings)
    check_layout(layout)
    return layout.ranks[-1]


@pytest.mark.parametrize("conv_layout", ConvLayout)
@pytest.mark.parametrize(
    ("spec", "tp", "columns", "elements"),
    CASES,
    ids=[f"{type(case[0]).__name__}-{index}" for index, case in enumerate(CASES)],
)
def test_pages_have_the_sizes_of_vllm(
    spec: RecurrentSpec, tp: int, columns: int, elements: int, conv_layout: ConvLayout
) -> None:
    # A page has ``K - 1 + S`` rows of columns, S only where the family speculates, then the states.
    rank = rank_of(spec, EngineSettings(tp, conv_layout=conv_layout, conv_rows_extra=EXTRA))
    form = spec.recurrence()
    rows = form.taps + (0 if isinstance(spec, Mamba1Spec | ShortConvSpec) else EXTRA)
    conv_bytes = columns * rows * form.conv_dtype.itemsize_bytes
    (region,) = rank.regions
    assert region.page_stride_bytes == conv_bytes + elements * form.state_dtype.itemsize_bytes
    states = [shard for shard in rank.shards if "conv" not in shard.field]
    assert [shard.offset_bytes for shard in states] == [conv_bytes] * len(states)


def conv_order(rank: RankLayout) -> list[str]:
    windows = [shard for shard in rank.shards if ".conv." in shard.field]
    return [s.field.rsplit(".", 1)[1] for s in sorted(windows, key=lambda s: s.offset_bytes)]


@pytest.mark.parametrize(
    ("spec", "order"),
    [
        (Mamba2Spec(0, 4, 4, 4, 2, 4, BF16, F32), ["x", "B", "C"]),
        (GdnSpec(0, 4, 8, 4, 4, 4, BF16, BF16), ["Q", "K", "V"]),
        (KdaSpec(0, 4, 4, 4, BF16, F32), ["Q", "K", "V"]),
        (ShortConvSpec(0, 8, 3, BF16), ["x"]),
    ],
)
@pytest.mark.parametrize("conv_layout", ConvLayout)
def test_columns_lie_in_vllms_order(
    spec: RecurrentSpec, order: list[str], conv_layout: ConvLayout
) -> None:
    assert conv_order(rank_of(spec, EngineSettings(2, conv_layout=conv_layout))) == order


def shard_of(rank: RankLayout, name: str) -> Shard:
    return next(shard for shard in rank.shards if shard.field.endswith(name))


@pytest.mark.parametrize(
    ("order", "strides"),
    [(MatrixOrder.VK, (6 * 4 * 4, 4 * 4, 4)), (MatrixOrder.KV, (6 * 4 * 4, 4, 6 * 4))],
)
def test_matrices_lie_in_the_engines_order(order: MatrixOrder, strides: tuple[int, ...]) -> None:
    gdn = GdnSpec(0, 2, 4, 4, 6, 4, DType.BFLOAT16, DType.FLOAT32)
    rank = rank_of(gdn, EngineSettings(2, matrix_order=order))
    assert shard_of(rank, "state").strides_bytes == strides
    mamba = Mamba2Spec(0, 4, 8, 16, 2, 4, DType.BFLOAT16, DType.FLOAT32)
    states = [
        shard_of(rank_of(mamba, EngineSettings(2, matrix_order=one)), "ssm") for one in MatrixOrder
    ]
    assert states[0] == states[1]


def test_value_heads_go_with_their_key_heads() -> None:
    """Check that rank r of T holds key and value heads of the same share, as `divide` cuts both."""
    rank = rank_of(GdnSpec(0, 4, 8, 4, 6, 4, BF16, BF16), EngineSettings(2))
    assert [str(span) for span in shard_of(rank, "conv.K").box] == ["[2, 4)", "[0, 4)", "[0, 3)"]
    assert [str(span) for span in shard_of(rank, "conv.V").box] == ["[4, 8)", "[0, 6)", "[0, 3)"]
    assert [str(span) for span in shard_of(rank, "state").box] == ["[4, 8)", "[0, 6)", "[0, 4)"]


def test_latents_are_whole_on_every_rank() -> None:
    layout = build_layout(ModelSpec("m", (MlaSpec(0, 576, BF16),)), EngineSettings(4))
    check_layout(layout)
    (shard,) = {rank.shards[0] for rank in layout.ranks}
    assert (shard.box[0].size, shard.token_stride_bytes) == (576, 1152)


@pytest.mark.parametrize(
    ("spec", "tp"),
    [
        (Mamba1Spec(0, 10, 4, 4, BF16, F32), 4),
        (GdnSpec(0, 2, 8, 4, 4, 4, BF16, BF16), 4),
        (KdaSpec(0, 6, 4, 4, BF16, F32), 4),
        (ShortConvSpec(0, 6, 3, BF16), 4),
        (LinearAttentionSpec(0, 6, 4, F32), 4),
    ],
)
def test_tp_that_does_not_divide_is_refused(spec: RecurrentSpec, tp: int) -> None:
    with pytest.raises(TpSizeError, match="can't be cut over TP 4"):
        build_layout(ModelSpec("m", (spec,)), EngineSettings(tp))


def test_every_recurrence_demands_the_rule_of_n_minus_1() -> None:
    for spec, *_ in CASES:
        assert ModelSpec("m", (spec,)).recurrent
    assert not ModelSpec("m", (MlaSpec(0, 8, BF16),)).recurrent
