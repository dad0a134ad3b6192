"""Quantised KV: the pages of vLLM's layouts with scales, float4 in pairs, and what can't be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from restow.broker.errors import LayoutFormError, PlanError
from restow.broker.families import (
    AttentionSpec,
    BlockScaledMlaSpec,
    EngineSettings,
    IndexerSpec,
    KvOrder,
    MlaSpec,
    ModelSpec,
    ScaleKind,
    Scales,
    build_layout,
)
from restow.broker.families.hf import model_from_hf_config
from restow.broker.families.specs import LayerSpec
from restow.broker.layout import DType, Layout, RankLayout, Shard, check_layout
from restow.broker.planner import make_plan

E4M3, E5M2, INT8 = DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2, DType.INT8
OWN = Scales(ScaleKind.PER_TOKEN_HEAD)
STATIC = Scales(ScaleKind.STATIC, "v1")
TOKENS, HEADS, DIM = 16, 8, 128


def rank_of(spec: LayerSpec, settings: EngineSettings) -> RankLayout:
    layout = build_layout(ModelSpec("m", (spec,)), settings)
    check_layout(layout)
    return layout.ranks[-1]


def shards_of(rank: RankLayout) -> dict[str, Shard]:
    return {shard.field.removeprefix("layers.0."): shard for shard in rank.shards}


@pytest.mark.parametrize("order", [KvOrder.HND, KvOrder.NHD])
@pytest.mark.parametrize("tp", [1, 2, 16])
@pytest.mark.parametrize("dtype", [E4M3, INT8])
def test_a_scale_lies_behind_the_elements_of_its_head(
    dtype: DType, tp: int, order: KvOrder
) -> None:
    # The cache is `[B, H, N, C]` with C = K, float32, V, float32: pages of ``heads * tokens * C``
    # bytes.
    settings = EngineSettings(tp, TOKENS, kv_order=order)
    rank = rank_of(AttentionSpec(0, HEADS, DIM, dtype, scales=OWN), settings)
    heads, content = max(HEADS // tp, 1), 2 * DIM + 2 * 4
    (region,) = rank.regions
    assert region.page_stride_bytes == heads * TOKENS * content
    shards = shards_of(rank)
    strides = (TOKENS * content, content) if order is KvOrder.HND else (content, heads * content)
    places = {"k": 0, "k_scale": DIM, "v": DIM + 4, "v_scale": 2 * DIM + 4}
    assert {name: shard.offset_bytes for name, shard in shards.items()} == places
    for name, shard in shards.items():
        assert (shard.strides_bytes[0], shard.token_stride_bytes) == strides
        assert shard.dtype is (DType.FLOAT32 if name.endswith("scale") else dtype)
        assert shard.box[0] == shards["k"].box[0]


def test_keys_whose_tokens_are_innermost_have_no_scales_beside_them() -> None:
    with pytest.raises(LayoutFormError, match="HDN"):
        rank_of(
            AttentionSpec(0, HEADS, DIM, INT8, scales=OWN), EngineSettings(kv_order=KvOrder.HDN)
        )


def test_scales_lie_with_keys_and_with_values_where_those_are_apart() -> None:
    rank = rank_of(AttentionSpec(0, HEADS, DIM, E4M3, scales=OWN), EngineSettings(kv_packed=False))
    assert [r.page_stride_bytes for r in rank.regions] == [HEADS * TOKENS * (DIM + 4)] * 2
    places = {name: (s.region, s.offset_bytes) for name, s in shards_of(rank).items()}
    assert places == {
        "k": ("layers.0.k", 0),
        "k_scale": ("layers.0.k", DIM),
        "v": ("layers.0.v", 0),
        "v_scale": ("layers.0.v", DIM),
    }


@pytest.mark.parametrize("scales", [Scales(), STATIC])
def test_static_scales_take_no_memory(scales: Scales) -> None:
    spec = AttentionSpec(0, HEADS, DIM, E4M3, scales=scales)
    rank = rank_of(spec, EngineSettings())
    assert rank.regions[0].page_stride_bytes == HEADS * TOKENS * 2 * DIM
    assert [field.scales for field in spec.fields()] == [scales.words] * 2


def test_scales_are_kept_for_the_same_window() -> None:
    fields = AttentionSpec(0, HEADS, DIM, E4M3, 64, OWN).fields()
    assert [field.window_tokens for field in fields] == [64] * 4


def test_rows_of_block_scaled_latents_have_the_parts_of_vllm() -> None:
    # A row of `fp8_ds_mla` has 512 bytes, 4 float32 and 64 bfloat16.
    rank = rank_of(BlockScaledMlaSpec(0), EngineSettings(tp=4, page_tokens=64))
    assert rank.regions[0].page_stride_bytes == 64 * 656
    places = {n: (s.offset_bytes, s.box[0].size, s.dtype) for n, s in shards_of(rank).items()}
    assert places == {
        "latent": (0, 512, E4M3),
        "latent_scale": (512, 4, DType.FLOAT32),
        "rope": (528, 64, DType.BFLOAT16),
    }
    assert not ModelSpec("m", (BlockScaledMlaSpec(0),)).recurrent


@pytest.mark.parametrize("dim", [128, 256])
def test_an_indexers_scales_lie_behind_the_elements_of_the_page(dim: int) -> None:
    # `indexer_k_quant_and_cache` of vLLM writes 64 tokens of 128 bytes, then 64 float32.
    spec = IndexerSpec(0, dim, page_tokens=64)
    settings = EngineSettings(tp=4, page_tokens=64, pages_per_block=2)
    rank = rank_of(spec, settings)
    blocks = dim // 128
    assert rank.regions[0].page_stride_bytes == 64 * (dim + 4 * blocks)
    places = {
        n: (s.offset_bytes, s.token_stride_bytes, s.box[0].size, s.dtype)
        for n, s in shards_of(rank).items()
    }
    assert places == {
        "index_k": (0, dim, dim, E4M3),
        "index_k_scale": (64 * dim, 4 * blocks, blocks, DType.FLOAT32),
    }
    assert rank == replace(rank_of(spec, replace(settings, tp=1)), rank=3)
    assert [one.scales for one in spec.fields()] == ["per token and 128 elements", ""]
    assert not ModelSpec("m", (spec,)).recurrent


def test_an_indexers_pages_are_those_of_its_kernels() -> None:
    for tokens in (16, 128):
        with pytest.raises(LayoutFormError, match=f"layers.0.index_k: .* 64 tokens, not {tokens}"):
            rank_of(IndexerSpec(0, page_tokens=64), EngineSettings(page_tokens=tokens))
    rank_of(IndexerSpec(0), EngineSettings(page_tokens=16))  # of an engine that has other kernels
    with pytest.raises(LayoutFormError, match="blocks of 128 elements do not divide"):
        IndexerSpec(0, 64)


@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("scales", [OWN, STATIC])
def test_only_types_of_one_byte_that_are_numbers_have_scales(dtype: DType, scales: Scales) -> None:
    if dtype in (E4M3, E5M2, INT8):
        AttentionSpec(0, 2, 4, dtype, scales=scales)
        return
    others = dtype is DType.FLOAT4_E2M1FN_X2
    why = "with scales of kind" if others else "has no scales"
    with pytest.raises(LayoutFormError, match=f"KV of type {dtype.label} {why}"):
        AttentionSpec(0, 2, 4, dtype, scales=scales)


@pytest.mark.parametrize(
    "scales",
    [Scales(ScaleKind.STATIC), Scales(ScaleKind.PER_TOKEN_HEAD, "v1"), Scales(fingerprint="v1")],
)
def test_static_scales_have_a_fingerprint_and_no_others(scales: Scales) -> None:
    with pytest.raises(LayoutFormError, match="scales per 16 elements need a fingerprint"):
        AttentionSpec(0, 2, 4, E4M3, scales=scales)


def test_latents_have_no_scales_per_token_and_head() -> None:
    MlaSpec(0, 576, E4M3, STATIC)
    with pytest.raises(LayoutFormError, match="give static scales or none"):
        MlaSpec(0, 576, E4M3, OWN)


def test_blocks_divide_the_latent() -> None:
    with pytest.raises(LayoutFormError, match="blocks of 100 elements do not divide"):
        BlockScaledMlaSpec(0, block_dim=100)


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
