"""Models with latent attention: what each layer keeps, by configs as they are published."""

from __future__ import annotations

from typing import Any

import pytest

from restow.broker.errors import LayoutFormError
from restow.broker.families import (
    AttentionSpec,
    BlockScaledMlaSpec,
    EngineSettings,
    IndexerSpec,
    LayerSpec,
    MlaSpec,
    ScaleKind,
    Scales,
    build_layout,
)
from restow.broker.families.hf import model_from_hf_config
from restow.broker.layout import DType, check_layout
from vllm_harness.latent_configs import CONFIGS, MISTRAL_LARGE_3_PARAMS

BF16, E4M3 = DType.BFLOAT16, DType.FLOAT8_E4M3FN
PER_BLOCK = Scales(ScaleKind.PER_BLOCK)
LATENT = "DeepSeek-V2-Lite DeepSeek-V3 GLM-4.7-Flash Kimi-K2 Kimi-K2.5 Kimi-VL DeepSeek-VL2 A.X-K1"
CHOOSING = {
    "DeepSeek-V3.2": [0, 1, 2],
    "GLM-5": list(range(8)),
    "GLM-5.2": [0, 1, 2, 6],
    "HY-V4": [1, 5],
}
"""Layers with an indexer."""
OCR = {
    "model_type": "deepseek_v2",
    "num_hidden_layers": 3,
    "hidden_size": 1280,
    "num_attention_heads": 10,
    "num_key_value_heads": 10,
    "kv_lora_rank": None,
    "qk_nope_head_dim": 0,
    "qk_rope_head_dim": 0,
    "v_head_dim": 0,
}
"""The language model of DeepSeek-OCR."""


def layers(config: dict[str, Any], **asked: Any) -> list[LayerSpec]:
    return list(model_from_hf_config(config, **asked).layers)


def indexer(layer: int) -> IndexerSpec:
    return IndexerSpec(layer, 128, 128, 64)


@pytest.mark.parametrize("name", LATENT.split())
def test_a_latent_in_every_layer_and_in_no_draft_layer(name: str) -> None:
    model = model_from_hf_config(CONFIGS[name])
    assert list(model.layers) == [MlaSpec(i, 576, BF16) for i in range(3)]
    assert model.depth == 3


def test_mistrals_own_file_of_a_model_with_latents() -> None:
    model = model_from_hf_config(MISTRAL_LARGE_3_PARAMS)
    assert model.name == "deepseek_v3"  # as vLLM calls it
    assert list(model.layers) == [MlaSpec(i, 576, BF16) for i in range(3)]


def test_mistral_4_has_smaller_latents() -> None:
    assert layers({"model_type": "mistral4", "num_hidden_layers": 1}) == [MlaSpec(0, 320, BF16)]


@pytest.mark.parametrize("model_type", ["pangu_ultra_moe", "sarvam_mla"])
def test_a_class_that_is_not_known_here_has_no_defaults(model_type: str) -> None:
    config = {"model_type": model_type, "num_hidden_layers": 1, "kv_lora_rank": 256}
    with pytest.raises(LayoutFormError, match="'qk_rope_head_dim' is missing"):
        layers(config)
    assert layers({**config, "qk_rope_head_dim": 32}) == [MlaSpec(0, 288, BF16)]


def test_heads_whose_keys_and_values_are_made_of_latents() -> None:
    assert layers(CONFIGS["MiniCPM3-4B"]) == [AttentionSpec(i, 40, 96, BF16) for i in range(3)]
    assert layers(CONFIGS["Step3"]) == [AttentionSpec(i, 1, 256, BF16) for i in range(3)]
    with pytest.raises(LayoutFormError, match="num_attention_groups: 2 is not 1"):
        layers({"model_type": "step3_text", "num_attention_groups": 2, "num_hidden_layers": 1})


def test_small_models_of_a_type_with_latents_have_none() -> None:
    part = {key: value for key, value in OCR.items() if key != "model_type"}
    whole = {"model_type": "deepseek_vl_v2", "language_config": part, "vision_config": {}}
    heads = [AttentionSpec(i, 10, 128, BF16) for i in range(3)]
    assert layers(OCR) == layers({**whole, **part}) == heads
    assert layers({**OCR, "model_type": "deepseek"}) == heads  # whose attention vLLM takes


@pytest.mark.parametrize("name", CHOOSING)
def test_an_indexer_where_a_layer_chooses_tokens_itself(name: str) -> None:
    count = CONFIGS[name]["num_hidden_layers"]
    wanted: list[LayerSpec] = []
    for i in range(count):
        wanted.append(MlaSpec(i, 576, BF16))
        if i in CHOOSING[name]:
            wanted.append(indexer(i))
    assert layers(CONFIGS[name]) == wanted


def test_latents_with_a_scale_a_block_beside_an_indexer() -> None:
    found = layers(CONFIGS["DeepSeek-V3.2"], kv_dtype=E4M3, kv_scales=PER_BLOCK)
    assert found[:2] == [BlockScaledMlaSpec(0), indexer(0)]
    static = Scales(ScaleKind.STATIC, "v1")
    found = layers(CONFIGS["DeepSeek-V3.2"], kv_dtype=E4M3, kv_scales=static)
    assert found[:2] == [MlaSpec(0, 576, E4M3, static), indexer(0)]


def test_what_a_checkpoint_declares_is_not_taken_for_scales_per_block() -> None:
    scheme = {"type": "float", "num_bits": 8, "dynamic": False}
    for name in ("DeepSeek-V3.2", "Kimi-K2", "DeepSeek-V3"):
        declared = {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_scheme": scheme}
        config = {**CONFIGS[name], "quantization_config": declared}
        with pytest.raises(LayoutFormError, match="name the static scales"):
            layers(config)
        static = Scales(ScaleKind.STATIC, "v1")
        assert layers(config, kv_scales=static)[0] == MlaSpec(0, 576, E4M3, static)


@pytest.mark.parametrize("pattern", ["FFSSFSSS", ["F", "F", "S", "S", "F", "S", "S", "S"]])
def test_the_letters_say_which_layers_choose(pattern: object) -> None:
    config = {**CONFIGS["GLM-5"], "index_topk_pattern": pattern, "index_topk_freq": 7}
    own = [one.layer for one in layers(config) if isinstance(one, IndexerSpec)]
    assert own == [0, 1, 4]


def test_two_attentions_in_a_layer_are_never_parted() -> None:
    model = model_from_hf_config(CONFIGS["LongCat-Flash"])
    assert list(model.layers) == [MlaSpec(i, 576, BF16) for i in range(6)]
    assert (model.name, model.depth) == ("longcat_flash", 3)
    layout = build_layout(model, EngineSettings(pp=2))
    check_layout(layout)
    held = [[shard.field for shard in rank.shards] for rank in layout.ranks]
    # vLLM cuts 3 layers into 2 and 1.
    assert [len(one) for one in held] == [4, 2]
    assert held[1] == ["layers.4.latent", "layers.5.latent"]


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("name", CONFIGS)
def test_layouts_are_whole_at_every_tp(name: str, tp: int) -> None:
    model = model_from_hf_config(CONFIGS[name])
    cut = {"MiniCPM3-4B": 8}.get(name, 16)
    layout = build_layout(model, EngineSettings(min(tp, cut), 64))
    check_layout(layout)
    if name not in ("MiniCPM3-4B", "Step3"):
        first = layout.ranks[0]
        for rank in layout.ranks:
            assert (rank.regions, rank.shards) == (first.regions, first.shards)


SPARSE = CONFIGS["DeepSeek-V3.2"]


@pytest.mark.parametrize(
    ("config", "dtype", "message"),
    [
        (CONFIGS["DeepSeek-V3"], E4M3, "only beside an indexer"),
        (CONFIGS["MiniCPM3-4B"], E4M3, "heads have no scales per block"),
        (SPARSE, DType.FLOAT8_E5M2, "per block are float8_e4m3fn, not float8_e5m2"),
        (SPARSE, BF16, "has no scales"),
        ({**SPARSE, "kv_lora_rank": 256}, E4M3, "256 and 64: .* have 512 and 64"),
        (CONFIGS["HY-V4"], E4M3, "layer_types: not all layers are sparse"),
    ],
)
def test_scales_per_block_are_of_latents_beside_an_indexer(
    config: dict[str, Any], dtype: DType, message: str
) -> None:
    with pytest.raises(LayoutFormError, match=message):
        model_from_hf_config(config, kv_dtype=dtype, kv_scales=PER_BLOCK)
