"""LoRA adapters of random weights for `tiny_model`, as peft writes them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

RANK = 8
WIDE = 0.5
"""So large that each adapter says other tokens."""


def write_adapter(model: Path, folder: Path, seed: int) -> Path:
    """Write an adapter of queries and values into ``folder``; another seed gives other weights."""
    config = json.loads((model / "config.json").read_text())
    hidden, width = config["hidden_size"], config["head_dim"]
    rng = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(config["num_hidden_layers"]):
        for part, heads in (("q", "num_attention_heads"), ("v", "num_key_value_heads")):
            name = f"base_model.model.model.layers.{layer}.self_attn.{part}_proj.lora"
            for side, shape in (("A", (RANK, hidden)), ("B", (config[heads] * width, RANK))):
                tensors[f"{name}_{side}.weight"] = torch.randn(shape, generator=rng) * WIDE
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    said = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": RANK,
        "lora_alpha": RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["q_proj", "v_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(said))
    return folder
