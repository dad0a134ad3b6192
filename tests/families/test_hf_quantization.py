"""Quantised KV out of configs: what was asked for, and what a checkpoint declares or can't say."""

from __future__ import annotations

from typing import Any

import pytest

from restow.broker.errors import LayoutFormError
from restow.broker.families import (
    AttentionSpec,
    MlaSpec,
    ScaleKind,
    Scales,
    model_from_hf_config,
)
from restow.broker.layout import DType

E4M3, BF16, INT8 = DType.FLOAT8_E4M3FN, DType.BFLOAT16, DType.INT8
NONE, OWN = Scales(), Scales(ScaleKind.PER_TOKEN_HEAD)
STATIC = Scales(ScaleKind.STATIC, "rev 7")
SCHEME = {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False, "symmetric": True}
DECLARED: dict[str, dict[str, Any]] = {
    "compressed-tensors": {"quant_method": "compressed-tensors", "kv_cache_scheme": SCHEME},
    "a scale a head": {
        "quant_method": "compressed-tensors",
        "kv_cache_scheme": {**SCHEME, "strategy": "attn_head"},
    },
    "modelopt, a scheme": {"quant_method": "modelopt", "kv_cache_scheme": SCHEME},
    "modelopt, a word": {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"},
    "modelopt, inside": {
        "quant_method": "modelopt",
        "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
    },
}
WEIGHTS_ONLY = {"quant_method": "fp8", "kv_cache_scheme": None}
MODEL = {"model_type": "granitemoehybrid", "num_hidden_layers": 2, "layer_types": ["attention"] * 2}


def kv(quantised: object = None, **asked: Any) -> tuple[DType, Scales]:
    model = model_from_hf_config({**MODEL, "quantization_config": quantised}, **asked)
    found = {(one.dtype, one.scales) for one in model.layers if isinstance(one, AttentionSpec)}
    (only,) = found
    return only


def test_what_was_asked_for() -> None:
    assert kv() == (BF16, NONE)
    assert kv(kv_dtype=E4M3) == (E4M3, NONE)
    assert kv(kv_dtype=E4M3, kv_scales=OWN) == (E4M3, OWN)
    assert kv(kv_dtype=INT8, kv_scales=OWN) == (INT8, OWN)
    assert kv(kv_dtype=DType.FLOAT8_E5M2, kv_scales=STATIC) == (DType.FLOAT8_E5M2, STATIC)


@pytest.mark.parametrize("name", DECLARED)
def test_a_declared_cache_is_float8_and_its_scales_have_to_be_named(name: str) -> None:
    """vLLM takes it for `fp8` unless another type is asked for (`attention.py`)."""
    config = DECLARED[name]
    assert kv(config, kv_scales=STATIC) == (E4M3, STATIC)
    assert kv(config, kv_dtype=BF16) == (BF16, NONE)
    assert kv(config, kv_dtype=E4M3, kv_scales=OWN) == (E4M3, OWN)
    assert kv(config, kv_scales=NONE) == (E4M3, NONE)
    for asked in ({}, {"kv_dtype": E4M3}):
        with pytest.raises(LayoutFormError, match="declares a KV cache of float8_e4m3fn") as caught:
            kv(config, **asked)
        assert "--kv-scales-fingerprint" in caught.value.message


def test_a_multimodal_model_has_it_beside_its_text() -> None:
    text = {"num_hidden_layers": 2}
    inside = {"text_config": {**text, "quantization_config": DECLARED["modelopt, a word"]}}
    beside = {"text_config": text, "quantization_config": DECLARED["modelopt, a word"]}
    for config in (inside, beside):
        model = model_from_hf_config({"model_type": "gemma3", **config}, kv_scales=STATIC)
        assert {(one.dtype, one.scales) for one in model.layers} == {(E4M3, STATIC)}  # type: ignore[union-attr]


def test_a_quantised_checkpoint_may_hold_scales_that_it_does_not_declare() -> None:
    assert kv(WEIGHTS_ONLY) == (BF16, NONE)
    assert kv(WEIGHTS_ONLY, kv_dtype=E4M3, kv_scales=NONE) == (E4M3, NONE)
    with pytest.raises(LayoutFormError, match=r"may hold scales .*--kv-scales none"):
        kv(WEIGHTS_ONLY, kv_dtype=E4M3)


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"},
        {"kv_cache_scheme": {**SCHEME, "num_bits": 4}},
        {"kv_cache_scheme": {**SCHEME, "type": "int"}},
        {"kv_cache_scheme": {**SCHEME, "dynamic": True}},
        {"kv_cache_scheme": ["float", 8]},
    ],
)
def test_a_scheme_that_no_family_describes(config: dict[str, Any]) -> None:
    assert kv(config, kv_dtype=BF16) == (BF16, NONE)
    with pytest.raises(LayoutFormError, match=r"is no KV cache that a family describes"):
        kv(config)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"kv_dtype": DType.UINT8}, "uint8 does not say what its bytes are"),
        ({"kv_dtype": INT8}, "int8 has scales; say which"),
        ({"kv_dtype": INT8, "kv_scales": NONE}, "int8 has scales; say which"),
        ({"kv_scales": OWN}, "bfloat16 has no scales, but per-token-head ones are given"),
        ({"kv_dtype": E4M3, "kv_scales": Scales(ScaleKind.STATIC)}, "need one that P and D share"),
        ({"conv_dtype": E4M3}, "conv_dtype: recurrent states are never float8_e4m3fn"),
        ({"ssm_dtype": DType.UINT8}, "ssm_dtype: recurrent states are never uint8"),
    ],
)
def test_nonsense_is_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutFormError, match=message):
        kv(**asked)


@pytest.mark.parametrize("key", ["dtype", "mamba_ssm_cache_dtype"])
def test_a_model_computes_with_floats(key: str) -> None:
    config = {"model_type": "nemotron_h", "hybrid_override_pattern": "M*", key: "float8_e4m3fn"}
    with pytest.raises(LayoutFormError, match=f"{key}: 'float8_e4m3fn' is not float32, bfloat16"):
        model_from_hf_config(config)


def test_latents_are_quantised_alike() -> None:
    config = {"model_type": "deepseek_v3", "num_hidden_layers": 1}
    (layer,) = model_from_hf_config(config, E4M3, kv_scales=STATIC).layers
    assert layer == MlaSpec(0, 576, E4M3, STATIC)
    with pytest.raises(LayoutFormError, match="no scales per token and head"):
        model_from_hf_config(config, E4M3, kv_scales=OWN)
