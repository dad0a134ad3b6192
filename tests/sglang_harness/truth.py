"""The state that transformers computes, written for SGLang's ranks: an engine of neither side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import NemotronHForCausalLM

from sglang_harness.values import file_of


def write_truth(model: NemotronHForCausalLM, tokens: Sequence[int], folder: Path) -> None:
    """Write the fields of the whole model after a prompt, by the names of `values.Sizes`."""
    config = model.config
    with torch.no_grad():
        cache = model(torch.tensor([list(tokens)]), use_cache=True).past_key_values
    fields: dict[str, Any] = {}
    channels = config.mamba_num_heads * config.mamba_head_dim
    shared = config.n_groups * config.ssm_state_size
    for layer, kind in enumerate(config.layers_block_type):
        held = cache.layers[layer]
        if kind == "full_attention":
            fields[f"{layer}.k"] = held.keys[0].transpose(0, 1).numpy()
            fields[f"{layer}.v"] = held.values[0].transpose(0, 1).numpy()
        elif kind == "linear_attention":
            taps = held.conv_states[0][0, :, -(config.conv_kernel - 1) :]
            x, b, c = taps.split([channels, shared, shared])
            fields |= {f"{layer}.x": x.numpy(), f"{layer}.B": b.numpy(), f"{layer}.C": c.numpy()}
            fields[f"{layer}.ssm"] = held.recurrent_states[0][0].numpy()
    np.savez(file_of(folder, list(tokens)), **fields)
