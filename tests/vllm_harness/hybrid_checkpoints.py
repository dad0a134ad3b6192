"""`HYBRIDS` makes a small model of each hybrid type that vLLM for the CPU runs, of random weights.

Vectors are wide enough for two ranks, and every kind of layer that a type has is there. Weights are
drawn wide, so that a state that is not the prompt's own gives other tokens.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import transformers
from torch import nn
from transformers import PreTrainedModel

from restow.demo.recall.task import VOCABULARY_SIZE

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
"""What all of them are told."""


@dataclass(frozen=True)
class Hybrid:
    """A type of model: its class without ``ForCausalLM``, and what its config has of its own.

    ``dtype`` is what vLLM computes it in: the CPU's delta nets know bfloat16 alone. ``needs`` names
    a package that vLLM's model imports, and that its wheel for the CPU does not bring. ``dt_bias``
    is what each head's is, where the class would set one with which a state is forgotten.
    """

    family: str
    config: dict[str, Any]
    dtype: str = "float32"
    needs: str = ""
    dt_bias: float | None = None

    @property
    def exact(self) -> bool:
        """Return whether two engines say the same tokens.

        bfloat16 rounds apart what float32 does not.
        """
        return self.dtype == "float32"

    def check_runs(self, python: Path) -> None:
        """Skip the test where vLLM's environment lacks the package that its model needs."""
        if not self.needs:
            return
        found = subprocess.run([python, "-c", f"import {self.needs}"], capture_output=True)
        if found.returncode:
            pytest.skip(f"vLLM's {self.family} needs {self.needs}, which is not in its environment")

    def make(self, **more: Any) -> PreTrainedModel:
        """Make the model with random weights; ``more`` is what its config has besides."""
        config = getattr(transformers, self._config_class)(
            **{**COMMON, **self.config, **more}, dtype=self.dtype
        )
        make: Callable[[Any], PreTrainedModel]
        make = getattr(transformers, f"{self.family}ForCausalLM")
        model = make(config)
        if self.dt_bias is not None:
            for name, values in model.named_parameters():
                if name.endswith(".dt_bias"):
                    nn.init.constant_(values, self.dt_bias)
        return model

    @property
    def _config_class(self) -> str:
        text = f"{self.family}TextConfig"
        return text if hasattr(transformers, text) else f"{self.family}Config"


_REMEMBERING = -6.0
"""So small that a state is seen in a reply 20 tokens later. With the 1 that the delta nets' classes
set, nothing of it is left by then: each state gives the same reply, also a wrong one."""
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_DELTA_NET = {
    "num_hidden_layers": 4,
    # No multiple of 32: of such keys in bfloat16 a CPU with AMX makes tiles of its own.
    "head_dim": 48,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}

HYBRIDS: dict[str, Hybrid] = {
    "falcon_h1": Hybrid(
        "FalconH1",
        {
            "num_hidden_layers": 3,
            "mamba_d_ssm": 128,
            "mamba_n_heads": 4,
            "mamba_d_head": 32,
            "mamba_d_state": 16,
            "mamba_n_groups": 1,
            "mamba_chunk_size": 16,
        },
    ),
    "zamba2": Hybrid(
        "Zamba2",
        {
            "num_hidden_layers": 7,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid", "mamba", "hybrid", "mamba"],
            "num_mem_blocks": 2,
            "num_key_value_heads": 4,
            "n_mamba_heads": 4,
            "mamba_d_state": 16,
            "mamba_ngroups": 2,
            "chunk_size": 16,
            "use_mem_rope": True,
        },
    ),
    "granitemoehybrid": Hybrid(
        "GraniteMoeHybrid",
        {
            "num_hidden_layers": 4,
            "layer_types": ["mamba", "attention", "mamba", "mamba"],
            "mamba_n_heads": 4,
            "mamba_d_head": 64,
            "mamba_d_state": 16,
            "mamba_n_groups": 1,
            "mamba_chunk_size": 16,
            "num_local_experts": 4,
            "shared_intermediate_size": 64,
        },
    ),
    "mamba2": Hybrid(
        "Mamba2",
        {
            "num_hidden_layers": 3,
            "num_heads": 4,
            "head_dim": 64,
            "intermediate_size": 256,
            "state_size": 16,
            "n_groups": 2,
            "chunk_size": 16,
        },
    ),
    "qwen3_next": Hybrid(
        "Qwen3Next",
        {
            **_DELTA_NET,
            **_EXPERTS,
            "intermediate_size": 256,
            "decoder_sparse_step": 4,
            "shared_expert_intermediate_size": 64,
        },
        "bfloat16",
        dt_bias=_REMEMBERING,
    ),
    "qwen3_5": Hybrid("Qwen3_5", _DELTA_NET, "bfloat16", needs="torchvision", dt_bias=_REMEMBERING),
    "qwen3_5_moe": Hybrid(
        "Qwen3_5Moe",
        {**_DELTA_NET, **_EXPERTS, "shared_expert_intermediate_size": 64},
        "bfloat16",
        needs="torchvision",
        dt_bias=_REMEMBERING,
    ),
}
