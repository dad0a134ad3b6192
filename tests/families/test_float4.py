"""KV in float4 (NVFP4): two elements in a byte, a float8 for 16 of them, pages as vLLM has them.

The places are those of vLLM 0.32's own views (`nvfp4_split_data_scale` of either half of a page, as
`_nvfp4_kv_views` calls it); `tests/vllm_engines/test_pages_of_vllm.py` asks it again.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from restow.broker.errors import LayoutFormError, PlanError
from restow.broker.families import (
    AttentionSpec,
    EngineSettings,
    KvOrder,
    MlaSpec,
    ModelSpec,
    ScaleKind,
    Scales,
    build_layout,
)
from restow.broker.families.hf import model_from_hf_config
from restow.broker.layout import DType, Layout, check_layout
from restow.broker.planner import make_plan

PACKED = DType.FLOAT4_E2M1FN_X2
SIXTEENTHS = Scales(ScaleKind.PER_16, "v1")
KV = AttentionSpec(0, 4, 64, PACKED, scales=SIXTEENTHS)
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_size": 512,
}


def layout(spec: AttentionSpec, **settings: object) -> Layout:
    made = build_layout(ModelSpec("m", (spec,)), EngineSettings(**settings))  # type: ignore[arg-type]
    check_layout(made)
    return made


@pytest.mark.parametrize("order", [KvOrder.HND, KvOrder.NHD])
def test_where_everything_lies_in_a_page(order: KvOrder) -> None:
    # The page has two heads and 16 tokens: 32 bytes a head and token, and 4 of scales.
    (rank, _) = layout(KV, tp=2, kv_order=order).ranks
    places = {
        shard.field.removeprefix("layers.0."): (
            shard.offset_bytes,
            shard.strides_bytes,
            shard.token_stride_bytes,
        )
        for shard in rank.shards
    }
    data, scale = ((512, 1), 32), ((64, 1), 4)
    if order is KvOrder.NHD:
        data, scale = ((32, 1), 64), ((4, 1), 8)
    assert places == {
        "k": (0, *data),
        "k_scale": (1024, *scale),
        "v": (1152, *data),
        "v_scale": (2176, *scale),
    }
    assert rank.regions[0].page_stride_bytes == 2304
    types = {shard.field: shard.dtype for shard in rank.shards}
    assert set(types.values()) == {PACKED, DType.FLOAT8_E4M3FN}


def test_fields_count_pairs_and_blocks() -> None:
    shapes = {field.name: (field.axes, field.shape) for field in KV.fields()}
    for part in "kv":
        assert shapes[f"layers.0.{part}"] == (("head", "pair"), (4, 32))
        assert shapes[f"layers.0.{part}_scale"] == (("head", "block"), (4, 4))


@pytest.mark.parametrize(
    "other",
    [
        replace(KV, scales=Scales(ScaleKind.PER_16, "v2")),
        AttentionSpec(0, 4, 64, DType.BFLOAT16),
        AttentionSpec(0, 4, 64, DType.FLOAT8_E4M3FN),
        AttentionSpec(0, 4, 32, DType.UINT8),
    ],
)
def test_nothing_else_becomes_float4_or_is_made_of_it(other: AttentionSpec) -> None:
    """Check types of as many bytes, and other static scales, too."""
    for pair in ((KV, other), (other, KV)):
        with pytest.raises(PlanError, match=r"layers\.0\.k"):
            make_plan(*(layout(one) for one in pair))


@pytest.mark.parametrize(
    ("dtype", "scales", "more"),
    [
        (PACKED, Scales(), {}),
        (PACKED, Scales(ScaleKind.STATIC, "v1"), {}),
        (PACKED, Scales(ScaleKind.PER_TOKEN_HEAD), {}),
        (PACKED, Scales(ScaleKind.PER_16), {}),
        (DType.FLOAT8_E4M3FN, SIXTEENTHS, {}),
        (PACKED, SIXTEENTHS, {"head_dim": 24}),
        (PACKED, SIXTEENTHS, {"value_dim": 32}),
    ],
)
def test_what_no_engine_keeps_is_refused(
    dtype: DType, scales: Scales, more: dict[str, int]
) -> None:
    with pytest.raises(LayoutFormError):
        AttentionSpec(0, 4, more.get("head_dim", 64), dtype, 0, scales, more.get("value_dim", 0))


def test_latents_and_other_orders_are_refused() -> None:
    with pytest.raises(LayoutFormError, match="latents"):
        MlaSpec(0, 576, PACKED, SIXTEENTHS)
    for settings in ({"kv_order": KvOrder.HDN}, {"kv_packed": False}):
        with pytest.raises(LayoutFormError, match="float4_e2m1fn_x2"):
            layout(KV, **settings)


def test_a_config_is_asked_for_it_with_its_scales() -> None:
    (first, _) = model_from_hf_config(LLAMA, PACKED, kv_scales=SIXTEENTHS).layers
    assert first == KV
    with pytest.raises(LayoutFormError, match="per-16"):
        model_from_hf_config(LLAMA, PACKED)
