"""`kv_type` finds of which type a layer's keys and values are, and what scales make values of them.

vLLM's float8 caches say no more of themselves than that they are bytes; the layer that writes them
knows the type and its scales (`model_executor/layers/attention/attention.py`,
`model_executor/layers/quantization/kv_cache.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_cache_interface import KVQuantMode

from restow.agents.engines.vllm.worker.rank_layout import dtype_of
from restow.agents.engines.vllm.worker.said_layers import unsaid
from restow.broker.families import NO_SCALES, ScaleKind, Scales
from restow.broker.layout import DType

FLOAT8 = {
    "fp8": DType.FLOAT8_E4M3FN,
    "fp8_e4m3": DType.FLOAT8_E4M3FN,
    "fp8_e5m2": DType.FLOAT8_E5M2,
}
"""Of vLLM's words for a cache's type, those of one scale for all keys of a layer and one for its
values, which are there when the weights are."""


def kv_type(name: str, spec: Any, module: Any) -> tuple[DType, Scales]:
    """Return the type of the cache's elements, and its scales.

    ``spec`` is vLLM's `AttentionSpec`, ``module`` the layer that writes. Raises
    `EngineUnsupportedError` where these leave open what the elements stand for.
    """
    if spec.kv_quant_mode is KVQuantMode.NONE:
        dtype = dtype_of(spec.dtype)
        if not dtype.castable:
            raise unsaid(name, f"KV in {spec.dtype}: what its elements stand for is missing")
        return dtype, NO_SCALES
    word = getattr(module, "kv_cache_dtype", None)
    dtype = FLOAT8.get(str(word), DType.UINT8)
    scales = [getattr(module, f"_{part}_scale_float", None) for part in ("k", "v")]
    fnuz = torch.version.hip is not None  # AMD's own float8, on some of its devices
    if (
        spec.kv_quant_mode is not KVQuantMode.FP8_PER_TENSOR
        or dtype is DType.UINT8
        or fnuz
        or not all(isinstance(one, float) for one in scales)
    ):
        raise unsaid(
            name,
            f"KV of type {word} ({spec.kv_quant_mode.name}) is not handed over yet; handed over "
            f"are {', '.join(FLOAT8)} with one scale for a layer's keys and one for its values",
        )
    return dtype, Scales(ScaleKind.STATIC, "k {!r}, v {!r}".format(*scales))
