"""Configs of hybrids: lists of layers, types of states, and what public files say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import NemotronHConfig

from restow.broker.errors import UnknownModelError
from restow.broker.families import (
    AttentionSpec,
    GdnSpec,
    KdaSpec,
    LayerSpec,
    LinearAttentionSpec,
    Mamba2Spec,
    MlaSpec,
    ModelSpec,
)
from restow.broker.families.hf import model_from_hf_config
from restow.broker.layout import DType

CONFIGS = json.loads((Path(__file__).parent / "hybrid_configs.json").read_text())
"""What the files of public hybrids say of the state; some lists of layers are shortened."""
BF16, F32 = DType.BFLOAT16, DType.FLOAT32


def _plain(layer: LayerSpec) -> LayerSpec:
    """Return a layer without its place in the model."""
    return replace(layer, layer=0)


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


def _layers(name: str) -> tuple[LayerSpec, ...]:
    return model_from_hf_config(CONFIGS[name]).layers


NEMOTRON = {"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*ME"}


def attention(model: ModelSpec) -> list[AttentionSpec]:
    return [layer for layer in model.layers if isinstance(layer, AttentionSpec)]


def mamba(model: ModelSpec) -> list[Mamba2Spec]:
    return [layer for layer in model.layers if isinstance(layer, Mamba2Spec)]


def kinds(model: ModelSpec) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for layer in model.layers:
        found.setdefault(layer.layer, set()).add(type(layer).__name__)
    return found


def test_the_letters_of_a_pattern() -> None:
    pattern = "MEMEM*EMEMEM*-"
    model = model_from_hf_config({**NEMOTRON, "hybrid_override_pattern": pattern})
    kept = {"M": {"Mamba2Spec"}, "*": {"AttentionSpec"}}
    assert kinds(model) == {i: kept[one] for i, one in enumerate(pattern) if one in kept}


def test_older_names_of_nemotron_h() -> None:
    older = {"mamba_n_groups": 4, "mamba_d_conv": 3}
    config = NemotronHConfig(**older)
    (layer, *_) = mamba(model_from_hf_config({**NEMOTRON, **older}))
    assert (layer.groups, layer.conv_kernel) == (config.n_groups, config.conv_kernel) == (4, 3)


def test_no_number_of_kv_heads_means_all_heads() -> None:
    config: dict[str, Any] = {**NEMOTRON, "num_key_value_heads": None, "num_attention_heads": 16}
    assert attention(model_from_hf_config(config))[0].kv_heads == 16
    config["model_type"], config["layer_types"] = "granitemoehybrid", ["attention"] * 32
    assert attention(model_from_hf_config(config))[0].kv_heads == 16


@pytest.mark.parametrize("key", ["layers_block_type", "layer_types"])
def test_both_names_of_the_list_and_both_names_of_its_words(key: str) -> None:
    config = {"model_type": "nemotron_h", key: ["mamba", "mlp", "attention", "moe"]}
    assert kinds(model_from_hf_config(config)) == {0: {"Mamba2Spec"}, 2: {"AttentionSpec"}}


def test_bamba_with_its_layers_listed() -> None:
    config = {
        "model_type": "bamba",
        "num_hidden_layers": 2,
        "layers_block_type": ["mamba", "attention"],
    }
    assert kinds(model_from_hf_config(config)) == {0: {"Mamba2Spec"}, 1: {"AttentionSpec"}}


def test_types_of_the_states() -> None:
    def types(**changes: Any) -> tuple[DType, DType, DType]:
        given = {key: changes.pop(key) for key in list(changes) if key[:2] in ("kv", "co", "ss")}
        asked = changes.pop("asked", None)
        model = model_from_hf_config({**NEMOTRON, **changes}, **given, dtype=asked)
        return attention(model)[0].dtype, mamba(model)[0].conv_dtype, mamba(model)[0].ssm_dtype

    bf16, f16, f32 = DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32
    assert types() == (bf16, bf16, f32)
    assert types(dtype="float16") == (f16, f16, f32)
    assert types(torch_dtype="torch.float16") == (f16, f16, f32)
    # vLLM's auto: _resolve_auto_dtype
    assert types(dtype="float32", torch_dtype="float16") == (bf16, bf16, f32)
    assert types(dtype="float32", mamba_ssm_cache_dtype="auto") == (bf16, bf16, bf16)
    assert types(dtype="auto") == (bf16, bf16, f32)
    assert types(dtype="bfloat16", asked=f32) == (f32, f32, f32)
    assert types(asked=f16, kv_dtype=f32, mamba_ssm_cache_dtype="auto") == (f32, f16, f16)
    assert types(mamba_ssm_cache_dtype="auto") == (bf16, bf16, bf16)
    assert types(mamba_ssm_cache_dtype="float16") == (bf16, bf16, f16)
    assert types(kv_dtype=DType.FLOAT8_E4M3FN) == (DType.FLOAT8_E4M3FN, bf16, f32)
    assert types(conv_dtype=f32, ssm_dtype=f16) == (bf16, f32, f16)
    granite = model_from_hf_config({"model_type": "granitemoehybrid", "dtype": "bfloat16"})
    assert mamba(granite)[0].ssm_dtype is bf16


def test_an_unknown_type_lists_the_known_ones() -> None:
    with pytest.raises(UnknownModelError, match=r"'perceptron' is unknown; known are .*bamba, "):
        model_from_hf_config({"model_type": "perceptron"})
