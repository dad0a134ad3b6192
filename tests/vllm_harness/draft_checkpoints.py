"""A draft of EAGLE for the tiny Llama of `tiny_models`, with random weights of a fixed seed."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from vllm_harness.tiny_models import COMMON, NUMBERS


def eagle_draft(folder: Path, seed: int = 1) -> Path:
    """Write a checkpoint with one layer, and what joins a token's embedding with a hidden state.

    vLLM takes embeddings and head from the model (`llama_eagle.py`).
    """
    config = LlamaConfig(**{**COMMON, **NUMBERS["llama"], "num_hidden_layers": 1})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = LlamaForCausalLM(config).state_dict()
        hidden = int(COMMON["hidden_size"])
        joined = torch.randn(hidden, 2 * hidden) * 0.2
    layer = {
        name.removeprefix("model."): value.clone()
        for name, value in made.items()
        if "layers." in name and "input_layernorm" not in name
    }
    folder.mkdir()
    save_file({**layer, "fc.weight": joined}, folder / "model.safetensors")
    said = {**config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(said, default=str))
    return folder
