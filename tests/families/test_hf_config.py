"""Configs of real model types against their configuration classes, and states against vLLM's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import BambaConfig, FalconH1Config, GraniteMoeHybridConfig, NemotronHConfig

from restow.broker.errors import LayoutFormError, UnknownModelError
from restow.broker.families import (
    AttentionSpec,
    ConvLayout,
    EngineSettings,
    Mamba2Spec,
    ModelSpec,
    build_layout,
)
from restow.broker.families.hf import model_from_hf_config
from restow.broker.layout import DType, check_layout

NEMOTRON = {"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*ME"}


def attention(model: ModelSpec) -> list[AttentionSpec]:
    return [layer for layer in model.layers if isinstance(layer, AttentionSpec)]


def mamba(model: ModelSpec) -> list[Mamba2Spec]:
    return [layer for layer in model.layers if isinstance(layer, Mamba2Spec)]


def check_mamba_names(model: ModelSpec, config: Any) -> None:
    """Check the numbers under the names that Bamba, Granite and Falcon-H1 share."""
    for layer in mamba(model):
        assert layer.heads == config.mamba_n_heads
        assert layer.head_dim == config.mamba_d_head
        assert layer.groups == config.mamba_n_groups
        assert layer.state == config.mamba_d_state
        assert layer.conv_kernel == config.mamba_d_conv
    head_dim = getattr(config, "head_dim", None)
    for spec in attention(model):
        assert spec.kv_heads == config.num_key_value_heads
        assert spec.head_dim == (head_dim or config.hidden_size // config.num_attention_heads)


def kinds(model: ModelSpec) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for layer in model.layers:
        found.setdefault(layer.layer, set()).add(type(layer).__name__)
    return found


def expected_kinds(config: Any) -> dict[int, set[str]]:
    names = {
        "linear_attention": {"Mamba2Spec"},
        "full_attention": {"AttentionSpec"},
        "hybrid": {"AttentionSpec", "Mamba2Spec"},
    }
    listed = enumerate(config.layers_block_type)
    return {index: names[kind] for index, kind in listed if kind in names}


@pytest.mark.parametrize(
    "changes",
    [
        {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"] * 3},
        {
            "layers_block_type": ["linear_attention", "full_attention"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 32,
            "n_groups": 2,
            "conv_kernel": 3,
            "num_key_value_heads": 2,
            "head_dim": 64,
        },
    ],
)
def test_nemotron_h(changes: dict[str, Any], tmp_path: Path) -> None:
    config = NemotronHConfig(**changes)
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    for given in (saved, {**changes, "model_type": "nemotron_h"}):
        model = model_from_hf_config(given)
        assert kinds(model) == expected_kinds(config)
        for layer in mamba(model):
            assert layer.heads == config.mamba_num_heads
            assert layer.head_dim == config.mamba_head_dim
            assert layer.state == config.ssm_state_size
            assert layer.groups == config.n_groups
            assert layer.conv_kernel == config.conv_kernel
            assert layer.ssm_dtype.label == config.mamba_ssm_cache_dtype
        for spec in attention(model):
            assert spec.kv_heads == config.num_key_value_heads
            assert spec.head_dim == config.head_dim


def test_the_letters_of_a_pattern() -> None:
    pattern = "MEMEM*EMEMEM*-"
    model = model_from_hf_config({**NEMOTRON, "hybrid_override_pattern": pattern})
    config = NemotronHConfig(hybrid_override_pattern=pattern)
    assert kinds(model) == expected_kinds(config)
    assert [layer.layer for layer in attention(model)] == [5, 12]


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


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"]},
        {
            "hidden_size": 128,
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_n_groups": 2,
            "mamba_d_state": 16,
            "mamba_d_conv": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
    ],
)
def test_granite(changes: dict[str, Any], tmp_path: Path) -> None:
    config = GraniteMoeHybridConfig(**changes)
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    for given in (saved, {**changes, "model_type": "granitemoehybrid"}):
        model = model_from_hf_config(given)
        assert kinds(model) == expected_kinds(config)
        check_mamba_names(model, config)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "num_hidden_layers": 2,
            "mamba_d_ssm": 4096,
            "mamba_n_heads": 32,
            "num_key_value_heads": 4,
        },
        {"num_hidden_layers": 2, "mamba_d_ssm": None, "mamba_n_heads": 64, "head_dim": 128},
    ],
)
def test_falcon_h1(changes: dict[str, Any], tmp_path: Path) -> None:
    config = FalconH1Config(**changes)
    model = model_from_hf_config({**changes, "model_type": "falcon_h1"})
    assert kinds(model) == expected_kinds(config)
    check_mamba_names(model, config)
    assert len(attention(model)) == len(mamba(model)) == config.num_hidden_layers


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_hidden_layers": 6, "attn_layer_indices": [1, 4]},
        {"num_hidden_layers": 2, "attn_layer_indices": [0], "num_key_value_heads": None},
    ],
)
def test_bamba(changes: dict[str, Any]) -> None:
    config = BambaConfig(**changes)
    model = model_from_hf_config({**changes, "model_type": "bamba"})
    assert kinds(model) == expected_kinds(config)
    check_mamba_names(model, config)


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


WRONG: dict[str, tuple[object, str]] = {
    "no object": ([1], "expected an object"),
    "no type": ({}, "'model_type' is missing"),
    "type is no name": ({"model_type": 5}, "model_type: 5"),
    "no layers": (
        {"model_type": "nemotron_h", "num_hidden_layers": 52},
        "hybrid_override_pattern is missing, and so is layers_block_type",
    ),
    "letter": ({**NEMOTRON, "hybrid_override_pattern": "MX"}, r"hybrid_override_pattern\[1\]"),
    "word": ({"model_type": "nemotron_h", "layer_types": ["rwkv"]}, r"layer_types\[0\].*rwkv"),
    "list": ({"model_type": "nemotron_h", "layer_types": 3}, "layer_types: 3 is not"),
    "text for a number": ({**NEMOTRON, "n_groups": "8"}, "n_groups: '8' is not"),
    "truth for a number": ({**NEMOTRON, "n_groups": True}, "n_groups: True is not"),
    "zero": ({**NEMOTRON, "ssm_state_size": 0}, "ssm_state_size: 0 is not"),
    "dtype": ({**NEMOTRON, "dtype": "float17"}, "dtype: dtype 'float17' is unknown"),
    "count": (
        {"model_type": "bamba", "num_hidden_layers": 3, "layer_types": ["mamba"]},
        "lists 1 layers, num_hidden_layers says 3",
    ),
    "heads": (
        {"model_type": "bamba", "mamba_n_heads": 3},
        "mamba_n_heads 3 does not divide the 8192 channels",
    ),
    "head size": ({"model_type": "bamba", "mamba_d_head": 65}, "are not the 8192 channels"),
    "indices": ({"model_type": "bamba", "attn_layer_indices": "1"}, "attn_layer_indices"),
    "one tap": ({**NEMOTRON, "conv_kernel": 1}, "conv_kernel"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name: str) -> None:
    config, message = WRONG[name]
    with pytest.raises(LayoutFormError, match=message):
        model_from_hf_config(config)  # type: ignore[arg-type]


def test_an_unknown_type_lists_the_known_ones() -> None:
    with pytest.raises(UnknownModelError, match=r"'perceptron' is unknown; known are .*bamba, "):
        model_from_hf_config({"model_type": "perceptron"})


@pytest.mark.parametrize("conv_layout", ConvLayout)
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize(
    "config",
    [
        NEMOTRON,
        {"model_type": "granitemoehybrid", "layer_types": ["mamba", "attention"] * 16},
        {"model_type": "falcon_h1", "mamba_d_ssm": 4096, "mamba_n_heads": 32, "mamba_n_groups": 1},
    ],
    ids=["nemotron_h", "granite", "falcon_h1"],
)
def test_pages_have_the_sizes_of_vllm(
    config: dict[str, Any], tp: int, conv_layout: ConvLayout
) -> None:
    # Mamba2 has (I + 2 G' N) / T columns of K - 1 + S rows, then (H / T, head_dim, N).
    spec = model_from_hf_config(config)
    extra = 2
    layout = build_layout(spec, EngineSettings(tp, conv_layout=conv_layout, conv_rows_extra=extra))
    check_layout(layout)
    pages = {region.name: region.page_stride_bytes for region in layout.ranks[-1].regions}
    for layer in mamba(spec):
        inner = layer.heads * layer.head_dim
        groups = layer.groups if layer.groups % tp == 0 else tp
        columns = (inner + 2 * groups * layer.state) // tp
        conv = columns * (layer.conv_kernel - 1 + extra) * layer.conv_dtype.itemsize_bytes
        ssm = layer.heads // tp * layer.head_dim * layer.state * layer.ssm_dtype.itemsize_bytes
        assert pages[f"layers.{layer.layer}.mamba"] == conv + ssm
    for attn in attention(spec):
        heads = max(attn.kv_heads // tp, 1)
        size = 16 * 2 * heads * attn.head_dim * attn.dtype.itemsize_bytes
        assert pages[f"layers.{attn.layer}.kv"] == size
