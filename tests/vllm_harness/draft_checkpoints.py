"""Small checkpoints with drafts, of random weights with a fixed seed: EAGLE, and one with MTP."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, LlamaConfig, LlamaForCausalLM

from vllm_harness.tiny_models import COMMON, HEADS, NUMBERS


def eagle_draft(folder: Path, seed: int = 1) -> Path:
    """Write a draft for the tiny Llama of `tiny_models`.

    The draft has one layer, and weights that join a token's embedding with a hidden state. vLLM
    takes embeddings and head from the model (`llama_eagle.py`).
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


def mtp_model(folder: Path) -> Path:
    """Write a model of GLM-4.5's type: two layers, and a third layer that drafts (MTP).

    As in its published checkpoints, the weights of the third layer stand behind those of the others
    (`glm4_moe_mtp.py`).
    """
    numbers = {**COMMON, **HEADS, "partial_rotary_factor": 0.5, "use_qk_norm": True}
    experts = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    }
    config = Glm4MoeConfig(**{**numbers, **experts, "num_hidden_layers": 3})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Glm4MoeForCausalLM(config).save_pretrained(folder)
        hidden, third = int(COMMON["hidden_size"]), "model.layers.2"
        joined = torch.randn(hidden, 2 * hidden) * 0.2
    weights = load_file(folder / "model.safetensors")
    weights[f"{third}.eh_proj.weight"] = joined
    for name in ("enorm", "hnorm", "shared_head.norm"):
        weights[f"{third}.{name}.weight"] = torch.ones(hidden)
    for name in ("embed_tokens", "shared_head.head"):
        whole = "lm_head" if "head" in name else "model.embed_tokens"
        weights[f"{third}.{name}.weight"] = weights[f"{whole}.weight"].clone()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    said = json.loads((folder / "config.json").read_text())
    said |= {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(said))
    return folder
