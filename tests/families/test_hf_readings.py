"""What was taken from where, and what was assumed."""

from __future__ import annotations

from typing import Any

import pytest

from restow.broker.families import ScaleKind, Scales
from restow.broker.families.hf import Readings, model_from_hf_config
from restow.broker.layout import DType
from vllm_harness.config_cases import EMBEDDED, MODELOPT, SCHEME

NEMOTRON = {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M*",
    "head_dim": 64,
    "conv_kernel": 3,
    "mamba_num_heads": None,
    "dtype": "float32",
    "vocab_size": 1000,
}


def read(config: dict[str, Any], **given: Any) -> dict[str, tuple[object, str, str]]:
    readings = Readings()
    model_from_hf_config(config, readings=readings, **given)
    return {one.key: (one.value, one.file, one.note) for one in readings}


def test_every_value_has_its_key_and_file_or_is_assumed() -> None:
    found = read(NEMOTRON)
    default = "the default of the model's configuration class"
    for key in ("model_type", "hybrid_override_pattern", "head_dim", "conv_kernel"):
        assert found[key] == (NEMOTRON[key], "config.json", "")
    for key, value in (("mamba_num_heads", 128), ("mamba_ssm_cache_dtype", "float32")):
        assert found[key] == (value, "", default)
    assert found["dtype"][:2] == ("float32", "config.json")
    assert "computed in bfloat16" in found["dtype"][2]
    # Of two names of one thing one is told; what nobody asked for is not.
    for key in ("attention_head_dim", "mamba_d_conv", "num_hidden_layers", "vocab_size"):
        assert key not in found


def test_no_dtype_is_told() -> None:
    config = {key: value for key, value in NEMOTRON.items() if key != "dtype"}
    assert read(config)["dtype"][:2] == ("bfloat16", "")
    assert "dtype" not in read(config, dtype=DType.FLOAT16)


def test_keys_of_parts_have_their_path() -> None:
    text = {"model_type": "kimi_linear", "linear_attn_config": {"num_heads": 8}}
    found = read({"model_type": "a_vl", "text_config": text})
    assert found["text_config.linear_attn_config.num_heads"] == (8, "config.json", "")
    assert found["text_config.linear_head_dim"][:2] == (128, "")


def test_declared_kv_names_its_file() -> None:
    scales = Scales(ScaleKind.STATIC, "v1")
    found = read(NEMOTRON, quant_config=MODELOPT, kv_scales=scales)
    note = "KV is float8_e4m3fn"
    assert found["quantization.kv_cache_quant_algo"] == ("FP8", "hf_quant_config.json", note)
    said = {**EMBEDDED, "kv_cache_scheme": SCHEME}
    found = read({**NEMOTRON, "quantization_config": said}, kv_scales=scales)
    assert found["quantization_config.kv_cache_scheme"] == (SCHEME, "config.json", note)


def test_what_is_left_aside_is_told() -> None:
    said = {"quant_method": "fp8", "kv_cache_scheme": "static"}
    found = read({**NEMOTRON, "quantization_config": said})
    assert "left aside" in found["quantization_config.kv_cache_scheme"][2]


@pytest.mark.parametrize("key", ["num_nextn_predict_layers", "mtp_num_hidden_layers"])
def test_layers_of_drafts_are_left_out_and_told(key: str) -> None:
    config = {
        "model_type": "qwen3_next",
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention", "full_attention"],
        key: 1,
    }
    assert model_from_hf_config(config).depth == 2
    assert "left out" in read(config)[key][2]
    plain = {"model_type": "deepseek_v3", "num_hidden_layers": 3}
    assert model_from_hf_config({**plain, key: 1}) == model_from_hf_config(plain)
