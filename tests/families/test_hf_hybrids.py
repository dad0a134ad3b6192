"""Configs of hybrids, nested ones among them, against configuration classes and public files."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import transformers

from families.hybrid_configs import CONFIGS
from restow.broker.errors import LayoutFormError
from restow.broker.families import (
    AttentionSpec,
    GdnSpec,
    KdaSpec,
    LayerSpec,
    LinearAttentionSpec,
    MlaSpec,
)
from restow.broker.families.hf import model_from_hf_config
from restow.broker.layout import DType

BF16, F32 = DType.BFLOAT16, DType.FLOAT32


def _plain(layer: LayerSpec) -> LayerSpec:
    """Return a layer without its place in the model."""
    return replace(layer, layer=0)


@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        ("qwen3_5", "qwen3_5_text"),
        ("qwen3_5_moe", "qwen3_5_moe_text"),
        ("minicpmv4_6", "qwen3_5_text"),
        ("minicpmv4_7", "qwen3_5_text"),
        ("lfm2_vl", "lfm2"),
        ("kimi_k3", "kimi_linear"),
    ],
)
def test_a_text_part_is_read_as_if_it_were_alone(outer: str, inner: str) -> None:
    text = {"model_type": inner, "num_hidden_layers": 5, "mamba_ssm_dtype": "float32"}
    model = model_from_hf_config({"model_type": outer, "text_config": text, "vision_config": {}})
    assert model.layers == model_from_hf_config(text).layers
    assert model.name == inner  # as vLLM calls it
    for wrong in ({}, {"text_config": None}, {"text_config": "qwen"}):
        with pytest.raises(LayoutFormError, match="text_config"):
            model_from_hf_config({"model_type": outer, **wrong})


def test_nemotron_with_vision_calls_its_text_llm_config() -> None:
    text = CONFIGS["Nemotron-3-Nano-30B-A3B"]
    model = model_from_hf_config({"model_type": "NemotronH_Nano_VL_V2", "llm_config": text})
    assert model.layers == model_from_hf_config(text).layers


def test_states_have_the_type_that_the_config_says_and_windows_the_models() -> None:
    gdn = next(layer for layer in _layers("Qwen3.5-27B") if isinstance(layer, GdnSpec))
    assert (gdn.conv_dtype, gdn.state_dtype) == (BF16, F32)
    assert (gdn.key_heads, gdn.value_heads) == (16, 48)


def test_kimi_k3_attends_in_every_fourth_layer_and_in_its_last() -> None:
    layers = _layers("Kimi-K3")
    latent = [layer for layer in layers if isinstance(layer, MlaSpec)]
    assert [layer.layer for layer in latent] == [*range(3, 92, 4), 92]
    assert {layer.latent_dim for layer in latent} == {576}
    kda = {_plain(layer) for layer in layers if isinstance(layer, KdaSpec)}
    assert kda == {KdaSpec(0, 96, 128, 4, BF16, F32)}


def test_both_generations_of_ling_have_one_model_type() -> None:
    three, two = _layers("Ling-3.0-flash"), _layers("Ring-2.5-1T")
    # 42 layers in groups of four: the two that are left over attend.
    attend = [layer.layer for layer in three if isinstance(layer, MlaSpec)]
    assert attend == [*range(3, 40, 4), 40, 41]
    assert _plain(three[0]) == KdaSpec(0, 32, 128, 4, BF16, F32)
    assert [layer.layer for layer in two if isinstance(layer, MlaSpec)] == [*range(7, 80, 8)]
    assert _plain(two[0]) == LinearAttentionSpec(0, 64, 128, BF16)
    unnamed = {**CONFIGS["Ling-3.0-flash"], "architectures": None}
    assert model_from_hf_config(unnamed).layers == three


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"architectures": ["CustomBailingForCausalLM"]},
        {"architectures": ["BailingMoeV2_5ForCausalLM"], "model_type": "llama"},
    ],
)
def test_the_text_part_of_ling_3_vl_is_ling_3_whatever_it_says(more: dict[str, Any]) -> None:
    # The config in vLLM's own test names few keys; its class has defaults for the others.
    text = {"num_hidden_layers": 42, "layer_group_size": 6, "rope_theta": 6_000_000, **more}
    whole = model_from_hf_config({"model_type": "bailing_moe_v3_vl", "text_config": text})
    assert whole.name == "bailing_hybrid"
    assert [one.layer for one in whole.layers if isinstance(one, MlaSpec)] == [*range(5, 42, 6)]
    assert _plain(whole.layers[0]) == KdaSpec(0, 16, 128, 4, BF16, F32)


def test_minimax_text_01_lists_its_layers_by_number() -> None:
    config = {
        "model_type": "minimax_text_01",
        "num_hidden_layers": 4,
        "attn_type_list": [0, 0, 0, 1],
        "hidden_size": 6144,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
    }
    layers = model_from_hf_config(config).layers
    assert _plain(layers[0]) == LinearAttentionSpec(0, 64, 128, BF16)
    assert layers[3] == AttentionSpec(3, 8, 128, BF16)
    assert model_from_hf_config({**config, "model_type": "minimax_m1"}).layers == layers


def test_zamba2_has_the_layers_of_its_class_where_none_are_listed() -> None:
    kinds = transformers.Zamba2Config().layers_block_type
    layers = model_from_hf_config({"model_type": "zamba2"}).layers
    attend = [layer.layer for layer in layers if isinstance(layer, AttentionSpec)]
    assert attend == [i for i, kind in enumerate(kinds) if kind == "hybrid"]


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"model_type": "lfm2_moe"}, "layer_types"),
        ({"model_type": "lfm2_moe", "layer_types": ["conv"]}, "layer_types lists 1 layers"),
        ({**CONFIGS["Ring-2.5-1T"], "layer_group_size": None}, "layer_group_size"),
        ({**CONFIGS["Ring-2.5-1T"], "architectures": None}, "architectures"),
        ({**CONFIGS["Ring-2.5-1T"], "architectures": ["BailingMoeV3_5ForCausalLM"]}, "V2_5"),
        (
            {**CONFIGS["Ling-3.0-flash"], "layer_types": ["full_attention"] * 42},
            "layer_types are not those of layer_group_size 4",
        ),
        ({"model_type": "minimax_text_01", "num_hidden_layers": 2}, "attn_type_list"),
        (
            {"model_type": "minimax_text_01", "num_hidden_layers": 3, "attn_type_list": [0, 1]},
            "attn_type_list",
        ),
        (
            {"model_type": "minimax_text_01", "num_hidden_layers": 2, "attn_type_list": [0, 2]},
            "attn_type_list",
        ),
        (
            {
                "model_type": "kimi_linear",
                "num_hidden_layers": 3,
                "linear_attn_config": {"kda_layers": [1, 2], "full_attn_layers": [4]},
            },
            r"linear_attn_config\.full_attn_layers: \[4\] is not from 1 to 3",
        ),
        (
            {
                "model_type": "kimi_linear",
                "num_hidden_layers": 3,
                "linear_attn_config": {"kda_layers": [0, 1]},
            },
            "kda_layers",
        ),
        (
            {"model_type": "nemotron_h", "num_hidden_layers": 5, "hybrid_override_pattern": "M*E"},
            "hybrid_override_pattern lists 3 layers, num_hidden_layers says 5",
        ),
        ({"model_type": "jamba", "attn_layer_offset": 8}, "attn_layer_offset"),
        ({"model_type": "mamba2", "num_heads": 100}, "num_heads: 100"),
        ({"model_type": "qwen3_5_text", "mamba_ssm_dtype": "int8"}, "mamba_ssm_dtype"),
    ],
)
def test_a_config_that_lies_is_refused_with_its_key(config: dict[str, Any], key: str) -> None:
    with pytest.raises(LayoutFormError, match=key):
        model_from_hf_config(config)


def _layers(name: str) -> tuple[LayerSpec, ...]:
    return model_from_hf_config(CONFIGS[name]).layers
