"""Real models' sizes as model specs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from restow.broker.families import AttentionSpec, Mamba2Spec, ModelSpec
from restow.broker.layout import DType

FILE = Path(__file__).with_name("geometries.json")


def geometries() -> dict[str, ModelSpec]:
    """The geometries of the families that Restow lays out: Mamba2 with attention."""
    table: dict[str, dict[str, Any]] = json.loads(FILE.read_text())
    return {
        name: _spec(name, numbers)
        for name, numbers in table.items()
        if not name.startswith("_") and numbers["family"] == "mamba2"
    }


def fifty_two_layers() -> ModelSpec:
    """The Nano geometry stretched to 52 layers with state: 46 Mamba2 and 6 attention."""
    nano = json.loads(FILE.read_text())["nemotron3-nano-30b"]
    return _spec("52 layers", nano | {"recurrent_layers": 46})


def _spec(name: str, numbers: dict[str, Any]) -> ModelSpec:
    recurrent = [
        Mamba2Spec(
            layer,
            numbers["heads"],
            numbers["mamba_head_dim"],
            numbers["state"],
            numbers["groups"],
            numbers["conv_kernel"],
            DType.parse(numbers["conv_dtype"]),
            DType.parse(numbers["ssm_dtype"]),
        )
        for layer in range(numbers["recurrent_layers"])
    ]
    first = numbers["recurrent_layers"]
    attention = [
        AttentionSpec(
            first + layer,
            numbers["kv_heads"],
            numbers["head_dim"],
            DType.parse(numbers["kv_dtype"]),
        )
        for layer in range(numbers["attention_layers"])
    ]
    return ModelSpec(name, (*recurrent, *attention))
