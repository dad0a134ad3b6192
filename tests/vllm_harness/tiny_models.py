"""Models of many types, too small to be of use, with random weights of a fixed seed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from restow.demo.recall.task import VOCABULARY_SIZE
from vllm_harness.checkpoints import write_checkpoint

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
}
HEADS = {"head_dim": 32}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
WINDOWS = {"sliding_window": 32}
GEMMA = {"num_hidden_layers": 6, "initializer_range": 0.02}
"""Its head is its embedding, times 8: drawn any wider, it says again what it was told last."""
NUMBERS: dict[str, dict[str, Any]] = {
    "llama": HEADS,
    "gemma3_text": HEADS | WINDOWS | GEMMA,
    "gpt_oss": HEADS | WINDOWS | EXPERTS,
    "qwen3_moe": HEADS | EXPERTS | {"mlp_only_layers": [0]},
    "mistral": HEADS | WINDOWS,
    "gemma2": HEADS | WINDOWS | GEMMA,
    "olmo3": HEADS | WINDOWS,
    "exaone4": HEADS | WINDOWS | {"sliding_window_pattern": 4},
    "mixtral": HEADS | EXPERTS,
    "cohere2": HEADS | WINDOWS | {"logit_scale": 1.0},
}
"""What a type has beside `COMMON`."""


def tiny_model(model_type: str, folder: Path) -> Path:
    """Write a checkpoint of the type into ``folder``, the same one every time."""

    def make() -> PreTrainedModel:
        numbers = COMMON | NUMBERS[model_type]
        config = AutoConfig.for_model(model_type, **numbers)
        made: PreTrainedModel = AutoModelForCausalLM.from_config(config)
        return made

    return write_checkpoint(make, folder)


def float8_kv(model: Path, scale: float) -> Path:
    """Give a checkpoint of `tiny_model` scales for float8, twice as large for values as for keys.

    The scales are written as compressed-tensors does, and the weights are not quantised.
    """
    config = json.loads((model / "config.json").read_text())
    (weights,) = model.glob("*.safetensors")
    tensors = load_file(weights)
    for layer in range(config["num_hidden_layers"]):
        for part, times in (("k", 1), ("v", 2)):
            tensors[f"model.layers.{layer}.self_attn.{part}_scale"] = torch.tensor(scale * times)
    save_file(tensors, weights, metadata={"format": "pt"})
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {},
        "ignore": ["lm_head"],
        "kv_cache_scheme": {
            "num_bits": 8,
            "type": "float",
            "strategy": "tensor",
            "dynamic": False,
            "symmetric": True,
        },
    }
    (model / "config.json").write_text(json.dumps(config))
    return model
