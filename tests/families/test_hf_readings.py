"""What was taken from where, what was assumed, and what is missing without transformers."""

from __future__ import annotations

import subprocess
import sys
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


LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
NO_TRANSFORMERS = "sys.modules['transformers'] = None"
OLD_TRANSFORMERS = (
    "old = sys.modules['transformers'] = type(sys)('transformers'); old.__version__ = '4.57.1'"
)


def read_in_new_process(config: dict[str, Any], first: str = "") -> str:
    """Run ``first`` in a new process and read a config there.

    Returns what the process makes of the config, and which of the big packages it imported.
    """
    code = f"""
import sys
{first}
from restow.broker.errors import LayoutFormError
from restow.broker.families.hf import model_from_hf_config
try:
    found = str(model_from_hf_config({config!r}).depth)
except LayoutFormError as error:
    found = str(error)
loaded = [name for name in ("torch", "transformers") if sys.modules.get(name)]
print(found, *loaded, sep="|")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout.strip().splitlines()[-1]


def test_a_complete_config_needs_neither_torch_nor_transformers() -> None:
    assert read_in_new_process(LLAMA) == "2"


@pytest.mark.parametrize("first", [NO_TRANSFORMERS, OLD_TRANSFORMERS])
@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({key: value for key, value in LLAMA.items() if key != "head_dim"}, "head_dim"),
        ({**LLAMA, "model_type": "mistral"}, "sliding_window"),  # the class has one
        ({**LLAMA, "model_type": "gemma2", "sliding_window": 32}, "layer_types"),
    ],
)
def test_a_missing_key_is_named_where_nothing_has_its_default(
    first: str, config: dict[str, Any], key: str
) -> None:
    told = read_in_new_process(config, first)
    assert told.startswith(f"config: '{key}' is missing: add it, or install restow[engine]")


def test_a_null_is_a_value_that_needs_no_default() -> None:
    config = {**LLAMA, "model_type": "mistral", "sliding_window": None}
    assert read_in_new_process(config, NO_TRANSFORMERS) == "2"
