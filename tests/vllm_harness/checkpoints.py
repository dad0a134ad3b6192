"""Small checkpoints of other families, with random weights of a fixed seed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    PreTrainedModel,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from restow.agents.engines.recall.task import VOCABULARY_SIZE
from restow.agents.engines.recall.tokenizer import make_tokenizer


def gated_delta_net(layers: int = 4) -> PreTrainedModel:
    """Qwen3-Next: three GDN layers to one of attention, which has experts."""
    return Qwen3NextForCausalLM(
        Qwen3NextConfig(
            vocab_size=VOCABULARY_SIZE,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=2048,
            initializer_range=0.2,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            # No multiple of 32: of such keys in bfloat16 a CPU with AMX makes tiles of its own.
            head_dim=48,
            linear_num_key_heads=4,
            linear_num_value_heads=8,
            linear_key_head_dim=64,
            linear_value_head_dim=64,
            mlp_only_layers=[layer for layer in range(layers) if layer % 4 != 3],
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=64,
            dtype="bfloat16",
        )
    )


def gemma3() -> Gemma3ForCausalLM:
    """Five layers with windows to one without."""
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            vocab_size=VOCABULARY_SIZE,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            sliding_window=32,
            max_position_embeddings=512,
            initializer_range=0.2,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            dtype="float32",
        )
    )


def write_checkpoint(make: Callable[[], PreTrainedModel], folder: Path) -> Path:
    """Write a checkpoint, the same one every time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        make().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder
