"""Layouts' inputs for benchmarks and tests: real models' sizes, and a tiny hybrid model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from restow.broker.families import (
    AttentionSpec,
    EngineSettings,
    GdnSpec,
    KdaSpec,
    LayerSpec,
    Mamba1Spec,
    Mamba2Spec,
    MlaSpec,
    ModelSpec,
    ShortConvSpec,
    build_layout,
)
from restow.broker.layout import DType, Layout

FILE = Path(__file__).with_suffix(".json")


def real_models() -> dict[str, ModelSpec]:
    """Return the specs of all models in `model_sizes.json`, by name."""
    table: dict[str, dict[str, Any]] = json.loads(FILE.read_text())
    return {
        name: _spec(name, numbers) for name, numbers in table.items() if not name.startswith("_")
    }


def fifty_two_layers() -> ModelSpec:
    """Return Nemotron-3-Nano stretched to 52 layers with state: 46 of Mamba2, 6 of attention."""
    nano = json.loads(FILE.read_text())["nemotron3-nano-30b"]
    return _spec("52 layers", nano | {"recurrent_layers": 46})


def tiny_hybrid(ranks: int) -> Layout:
    """Return a layout of one Mamba2 and one attention layer, in pages of 16 tokens.

    Its page lists are as long as a real model's, and its bytes are few.
    """
    heads, dtype = max(ranks, 2), DType.BFLOAT16
    layers = (
        Mamba2Spec(0, 8, 16, 16, heads, 4, dtype, DType.FLOAT32),
        AttentionSpec(1, heads, 16, dtype),
    )
    return build_layout(ModelSpec("tiny hybrid", layers), EngineSettings(tp=ranks, page_tokens=16))


def _spec(name: str, numbers: dict[str, Any]) -> ModelSpec:
    layers: list[LayerSpec] = []
    for _ in range(numbers.get("recurrent_layers", 0)):
        layers.append(_recurrent(len(layers), numbers))
    for _ in range(numbers.get("sliding_window_layers", 0)):
        layers.append(_attention(len(layers), numbers, numbers["sliding_window"]))
    for _ in range(numbers["attention_layers"]):
        layers.append(_attention(len(layers), numbers))
    return ModelSpec(name, tuple(layers), revision="1")


def _attention(layer: int, numbers: dict[str, Any], window_tokens: int = 0) -> LayerSpec:
    dtype = DType.parse(numbers["kv_dtype"])
    if numbers.get("attention") == "mla":
        return MlaSpec(layer, numbers["latent_dim"], dtype)
    return AttentionSpec(layer, numbers["kv_heads"], numbers["head_dim"], dtype, window_tokens)


def _recurrent(layer: int, numbers: dict[str, Any]) -> LayerSpec:
    n = numbers
    kernel, conv = n["conv_kernel"], DType.parse(n["conv_dtype"])
    if n["family"] == "short_conv":
        return ShortConvSpec(layer, n["channels"], kernel, conv)
    ssm = DType.parse(n["ssm_dtype"])
    match n["family"]:
        case "mamba1":
            return Mamba1Spec(layer, n["channels"], n["state"], kernel, conv, ssm)
        case "mamba2":
            heads, dim = n["heads"], n["mamba_head_dim"]
            return Mamba2Spec(layer, heads, dim, n["state"], n["groups"], kernel, conv, ssm)
        case "gdn":
            keys, values = (n["key_heads"], n["key_dim"]), (n["value_heads"], n["value_dim"])
            return GdnSpec(layer, keys[0], values[0], keys[1], values[1], kernel, conv, ssm)
        case "kda":
            return KdaSpec(layer, n["heads"], n["dim"], kernel, conv, ssm)
    raise ValueError(f"family {n['family']!r} is unknown")
