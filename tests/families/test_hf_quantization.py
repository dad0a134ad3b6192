"""Quantised KV out of configs: what was asked for, and what a checkpoint declares or can't say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from restow.broker.errors import LayoutFormError
from restow.broker.families import AttentionSpec, MlaSpec, ScaleKind, Scales
from restow.broker.families.hf import model_from_hf_config
from restow.broker.layout import DType
from vllm_harness.config_cases import CASES, Case

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
BY_TENSORS = {"quant_method": "compressed-tensors", "kv_cache_scheme": SCHEME}
UNKNOWN = Scales(ScaleKind.UNKNOWN)
PUBLIC = json.loads((Path(__file__).parent / "quantised_configs.json").read_text())
"""What the files of public checkpoints say of the state. They are shortened from those of 21 August
2026 in the GitHub repository ai-dynamo/aiconfigurator, folder
aic-core/src/aiconfigurator_core/model_configs. Nemotron Super's and Ultra's files of ModelOpt name
no producer there."""
METHODS = {
    "NVIDIA-Nemotron-3-Super-120B-A12B-FP8": "modelopt",
    "NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4": "modelopt_fp4",
    "NVIDIA-Nemotron-3-Ultra-550B-A55B-FP8": "modelopt",
    "NVIDIA-Nemotron-3-Ultra-550B-A55B-NVFP4": "modelopt_fp4",
    "NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4": "modelopt_fp4",
    "NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4": "modelopt_mixed",
    "Qwen3.6-27B-NVFP4": "modelopt_mixed",
    "Qwen3.5-122B-A10B-NVFP4": "modelopt_fp4",
    "Qwen3-32B-FP8-Static-PerTensor": "modelopt",
    "Llama-3.1-70B-Instruct-FP8": "modelopt",
    "Kimi-K2.5-NVFP4": "modelopt_fp4",
    "DeepSeek-V3.1-NVFP4": "modelopt_fp4",
    "GLM-5-NVFP4": "modelopt_fp4",
}
TRIMMED = [name for name in METHODS if "Super" in name or "Ultra" in name or "Static" in name]
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
    # Unless another type is asked for, vLLM takes the cache for `fp8` (`attention.py`).
    config = DECLARED[name]
    assert kv(config, kv_scales=STATIC) == (E4M3, STATIC)
    assert kv(config, kv_dtype=BF16) == (BF16, NONE)
    assert kv(config, kv_dtype=E4M3, kv_scales=OWN) == (E4M3, OWN)
    assert kv(config, kv_scales=NONE) == (E4M3, NONE)
    for asked in ({}, {"kv_dtype": E4M3}):
        with pytest.raises(LayoutFormError, match="declares a KV cache of float8_e4m3fn") as caught:
            kv(config, **asked)
        assert "--kv-scales-fingerprint" in caught.value.message


def public(name: str, **asked: Any) -> tuple[DType, Scales, str]:
    """Return the type and the scales of the KV of a public checkpoint, and its method."""
    files = PUBLIC[name]
    model = model_from_hf_config(files["config"], quant_config=files["hf_quant_config"], **asked)
    (kept,) = {(s.dtype, s.scales) for s in model.layers if isinstance(s, AttentionSpec | MlaSpec)}
    return *kept, model.quantisation


@pytest.mark.parametrize("name", METHODS)
def test_a_public_checkpoint_alone_makes_a_layout_for_looking_at(name: str) -> None:
    assert public(name, looking=True) == (E4M3, UNKNOWN, METHODS[name])
    with pytest.raises(LayoutFormError, match="--kv-"):
        public(name)
    assert public(name, looking=True, kv_dtype=BF16)[:2] == (BF16, NONE)
    assert public(name, looking=True, kv_dtype=E4M3, kv_scales=STATIC)[:2] == (E4M3, STATIC)


@pytest.mark.parametrize("name", METHODS)
def test_a_revision_names_what_a_whole_declaration_says_and_no_trimmed_one(name: str) -> None:
    for asked in ({"revision": "r7"}, {"kv_scales": Scales(ScaleKind.STATIC, "r7")}):
        wanted = UNKNOWN if name in TRIMMED else Scales(ScaleKind.STATIC, "r7")
        assert public(name, looking=True, **asked)[:2] == (E4M3, wanted)


def test_the_config_counts_before_the_file_beside_it() -> None:
    # Qwen3.6-35B's file of ModelOpt declares float8; its config, which vLLM asks, does not.
    assert public("Qwen3.6-35B-A3B-NVFP4", looking=True) == (BF16, NONE, "modelopt_mixed")


def test_another_producers_declaration_is_not_taken_for_modelopts() -> None:
    config = {"producer": {"name": "another"}, "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    with pytest.raises(LayoutFormError, match="not heeded"):
        kv(config, looking=True)
    assert kv({"quant_method": "spqr2", "quant_algo": "FP8"}, looking=True, kv_dtype=BF16) == (
        BF16,
        NONE,
    )


def test_a_multimodal_model_has_it_beside_its_text() -> None:
    text = {"num_hidden_layers": 2}
    inside = {"text_config": {**text, "quantization_config": BY_TENSORS}}
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
        {"quant_method": "modelopt", "kv_cache_quant_algo": "INT8"},
        {"quant_method": "modelopt", "kv_cache_scheme": {**SCHEME, "dynamic": None}},
        {**BY_TENSORS, "kv_cache_scheme": {**SCHEME, "num_bits": 4}},
        {**BY_TENSORS, "kv_cache_scheme": {**SCHEME, "type": "int"}},
        {**BY_TENSORS, "kv_cache_scheme": {**SCHEME, "symmetric": False}},
        {**BY_TENSORS, "kv_cache_scheme": {**SCHEME, "strategy": "token"}},
        {**BY_TENSORS, "kv_cache_scheme": ["float", 8]},
        {**BY_TENSORS, "kv_cache_scheme": {}},
        {"kv_cache_scheme": SCHEME},
        {"quant_method": "spqr2"},
        {"quant_method": 8},
        {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "W4A8_AWQ"}},
    ],
)
def test_what_does_not_say_the_type_of_kv(config: dict[str, Any]) -> None:
    assert kv(config, kv_dtype=BF16) == (BF16, NONE)
    with pytest.raises(LayoutFormError, match=r"is not .*--kv-dtype") as caught:
        kv(config)
    assert caught.value.subject["key"].startswith("quantization_config.")


@pytest.mark.parametrize("config", ["fp8", ["fp8"], 8])
def test_a_quantisation_that_is_no_object(config: object) -> None:
    with pytest.raises(LayoutFormError, match=r"quantization_config: .* is not an object"):
        kv(config)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_types_are_those_of_vllm(case: Case) -> None:
    # tests/vllm_engines/test_layers_of_vllm.py asks vLLM about the same cases.
    if case.refused:
        with pytest.raises(LayoutFormError, match=case.refused):
            case.model()
        return
    model = case.model()
    assert {one.dtype.label for one in model.layers} == {case.kv}  # type: ignore[union-attr]
    assert (model.name, model.quantisation) == (case.model_type, case.method)


def test_latents_heed_what_modelopt_declares_and_nothing_else() -> None:
    # In vLLM `MLAAttention` does not look at kv_cache_scheme, which compressed-tensors has.
    config = {"model_type": "deepseek_v3", "num_hidden_layers": 1}
    for said, dtype, scales in (
        (DECLARED["modelopt, a word"], E4M3, STATIC),
        (BY_TENSORS, BF16, None),
    ):
        model = model_from_hf_config({**config, "quantization_config": said}, kv_scales=scales)
        assert {one.dtype for one in model.layers} == {dtype}  # type: ignore[union-attr]


def test_a_model_without_attention_has_no_kv_to_be_told() -> None:
    model = model_from_hf_config({"model_type": "mamba2", "quantization_config": BY_TENSORS})
    assert model.quantisation == "compressed-tensors"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"kv_dtype": DType.UINT8}, "uint8 does not say what its bytes are"),
        ({"kv_dtype": INT8}, "int8 has scales; say which"),
        ({"kv_dtype": INT8, "kv_scales": NONE}, "int8 has scales; say which"),
        ({"kv_scales": OWN}, "bfloat16 has no scales, but per-token-head scales are given"),
        (
            {"kv_dtype": E4M3, "kv_scales": Scales(ScaleKind.STATIC)},
            "need a fingerprint that P and D share",
        ),
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
