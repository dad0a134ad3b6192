"""Configs that declare types in one place or another, and what vLLM 0.32 makes of each.

`config_types.py` asks vLLM, `tests/families/test_hf_quantization.py` asks Restow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from restow.broker.families import ModelSpec, ScaleKind, Scales
from restow.broker.families.hf import Readings, model_from_hf_config

SCHEME = {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False, "symmetric": True}
TEXT: dict[str, Any] = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "vocab_size": 128,
}
MODELOPT: dict[str, Any] = {
    "producer": {"name": "modelopt", "version": "0.29.0"},
    "quantization": {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": "FP8",
        "group_size": 16,
        "exclude_modules": ["lm_head"],
    },
}
EMBEDDED = {"quant_method": "modelopt", "quant_algo": "FP8", "producer": {"name": "modelopt"}}
TENSORS = {"quant_method": "compressed-tensors", "format": "float-quantized"}
MIXED = "MIXED_PRECISION"
BF16, F16, FP8 = "bfloat16", "float16", "float8_e4m3fn"


@dataclass(frozen=True, slots=True)
class Case:
    """A config, ModelOpt's file beside it, and what vLLM makes of both.

    ``refused``: what Restow says where vLLM takes no heed of what is declared, or refuses too.
    ``since``: an older vLLM refuses.
    """

    name: str
    config: dict[str, Any]
    quant_config: dict[str, Any] | None = None
    kv: str = BF16
    method: str = ""
    refused: str = ""
    model_type: str = "gemma3_text"
    since: str = ""

    def model(self) -> ModelSpec:
        """Return the model that Restow reads from the config, with scales where they are needed."""
        quantised = self.kv == FP8
        return model_from_hf_config(
            self.config,
            kv_scales=Scales(ScaleKind.STATIC, "v1") if quantised else None,
            quant_config=self.quant_config,
            readings=Readings(),
        )


def _text(**changes: Any) -> dict[str, Any]:
    return {**TEXT, **changes}


def _whole(text: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    return {"model_type": "gemma3", "text_config": text or TEXT, **changes}


def _file(**changes: Any) -> dict[str, Any]:
    return {**MODELOPT, "quantization": {**MODELOPT["quantization"], **changes}}


def _said(**changes: Any) -> dict[str, Any]:
    return _text(quantization_config=changes)


CASES = (
    Case("nothing", TEXT),
    Case("float32", _text(torch_dtype="float32")),
    Case("float16 that overflows", _text(torch_dtype=F16)),
    Case("of a part", _whole(_text(torch_dtype="float32"))),
    Case("of the whole", _whole(_text(torch_dtype="float32"), torch_dtype=BF16)),
    Case("a file", TEXT, MODELOPT, FP8, "modelopt_fp4"),
    Case("a file, small letters", TEXT, _file(kv_cache_quant_algo="fp8"), FP8, "modelopt_fp4"),
    Case("a file, float8 weights", TEXT, _file(quant_algo="FP8"), FP8, "modelopt"),
    Case("a file, weights alone", TEXT, _file(kv_cache_quant_algo=None), BF16, "modelopt_fp4"),
    Case("a file, mixed", TEXT, _file(quant_algo=MIXED), FP8, "modelopt_mixed", since="0.33"),
    Case("a file, AWQ", TEXT, _file(quant_algo="W4A8_AWQ"), refused="quant_algo: 'W4A8_AWQ'"),
    Case("a file, no algorithm", TEXT, _file(quant_algo=None), refused="not heeded by vLLM"),
    Case(
        "a file of nobody",
        TEXT,
        {"quantization": MODELOPT["quantization"]},
        refused="hf_quant_config.json: quantization.kv_cache_quant_algo: 'FP8' is not heeded",
    ),
    Case("a file, int8", TEXT, _file(kv_cache_quant_algo="INT8"), refused="'INT8' is not static"),
    Case("a file, NVFP4", TEXT, _file(kv_cache_quant_algo="NVFP4"), refused="'NVFP4' is not"),
    Case("a file and the config", _said(**EMBEDDED), MODELOPT, BF16, "modelopt"),
    Case("a file for parts", _whole(), MODELOPT, FP8, "modelopt_fp4"),
    Case("a file and a part", _whole(_said(**EMBEDDED)), MODELOPT, FP8, "modelopt_fp4"),
    Case("a scheme", _said(**EMBEDDED, kv_cache_scheme=SCHEME), None, FP8, "modelopt"),
    Case("a word", _said(**EMBEDDED, kv_cache_quant_algo="FP8"), None, FP8, "modelopt"),
    Case("a word, NVFP4", _said(**EMBEDDED | {"quant_algo": "NVFP4"}), None, BF16, "modelopt_fp4"),
    Case("a word, W4A16", _said(**EMBEDDED | {"quant_algo": "W4A16_NVFP4"}), method="modelopt_fp4"),
    Case("a word, MXFP8", _said(**EMBEDDED | {"quant_algo": "MXFP8"}), method="modelopt_mxfp8"),
    Case("a word, mixed", _said(**EMBEDDED | {"quant_algo": MIXED}), method="modelopt_mixed"),
    Case(
        "a scheme for parts",
        _whole(quantization_config={**EMBEDDED, "kv_cache_scheme": SCHEME}),
        None,
        FP8,
        "modelopt",
    ),
    Case(
        "a scheme of a part",
        _whole(_said(**EMBEDDED, kv_cache_scheme=SCHEME)),
        None,
        BF16,
        "modelopt",
    ),
    Case("tensors", _said(**TENSORS, kv_cache_scheme=SCHEME), None, FP8, "compressed-tensors"),
    Case(
        "tensors, at run time",
        _said(**TENSORS, kv_cache_scheme={**SCHEME, "dynamic": True}),
        None,
        FP8,
        "compressed-tensors",
    ),
    Case(
        "tensors, another spelling",
        _said(quant_method="compressed_tensors", kv_cache_scheme=SCHEME),
        None,
        FP8,
        "compressed-tensors",
    ),
    Case("tensors, weights alone", _said(**TENSORS), None, BF16, "compressed-tensors"),
    Case(
        "tensors, another key",
        _text(compression_config={**TENSORS, "kv_cache_scheme": SCHEME}),
        None,
        FP8,
        "compressed-tensors",
    ),
    Case(
        "tensors of a part",
        _whole(_said(**TENSORS, kv_cache_scheme=SCHEME)),
        None,
        FP8,
        "compressed-tensors",
    ),
    Case("fp8, left aside", _said(quant_method="fp8", kv_cache_scheme="static"), None, BF16, "fp8"),
    Case("mxfp4", _said(quant_method="mxfp4"), None, BF16, "mxfp4"),
    Case("fbgemm", _said(quant_method="fbgemm_fp8"), None, BF16, "fbgemm_fp8"),
    Case(
        "quark, left aside",
        _said(
            quant_method="quark",
            export={"kv_cache_group": ["*k_proj"], "pack_method": "order"},
            layer_quant_config={"*k_proj": {"output_tensors": {"dtype": "fp8_e4m3"}}},
        ),
        None,
        BF16,
        "quark",
    ),
)
