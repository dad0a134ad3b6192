"""Ask vLLM which types it would choose for the configs of folders: a line of JSON for each.

Run with vLLM's interpreter: it imports nothing of Restow.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

from vllm.config.model import _get_and_verify_dtype
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.transformers_utils.config import get_config, get_hf_text_config
from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype, resolve_kv_cache_dtype_string


def _types(folder: str) -> dict[str, str]:
    """Return the types of a config as vLLM finds them.

    `ModelConfig` and `EngineArgs.create_engine_config` find them first, and then `Attention`.
    """
    whole = get_config(folder, trust_remote_code=False)
    text = get_hf_text_config(whole)
    said = ModelArchConfigConvertorBase(whole, text).get_quantization_config() or {}
    dtype = _get_and_verify_dtype(folder, whole, "auto", is_pooling_model=False)
    kv = resolve_kv_cache_dtype_string("auto", SimpleNamespace(hf_config=whole))
    method = said.get("quant_method", "")
    for name in ("modelopt", "modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed"):
        # ModelConfig._verify_quantization, in this order
        own = get_quantization_config(name).override_quantization_method
        if said and (override := own(said, None, hf_config=whole)) is not None:
            method = override
            break
    if kv == "auto" and method == "compressed-tensors" and said.get("kv_cache_scheme") is not None:
        kv = "fp8_e4m3"  # Attention.__init__: for any scheme that it validates
    model = SimpleNamespace(dtype=dtype)
    stored = "float8_e4m3fn" if kv == "fp8_e4m3" else kv_cache_dtype_str_to_dtype(kv, model)
    return {
        "kv": str(stored).removeprefix("torch."),
        "method": method,
        "model_type": text.model_type,
    }


for folder in sys.argv[1:]:
    try:
        print(json.dumps(_types(folder)), flush=True)
    except ValueError as error:
        print(json.dumps({"refused": str(error)}), flush=True)
