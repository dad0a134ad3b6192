"""What vLLM itself says of recurrent states. Runs in vLLM's environment.

Reads configs by name as JSON on stdin, answers with shapes and types by name and TP size on stdout;
with the reason, where vLLM can't load a model's class here.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import PreTrainedConfig
from vllm.model_executor.models.registry import ModelRegistry
from vllm.transformers_utils.config import get_config

TP_SIZES = (1, 2, 3, 4, 5, 6, 8, 12, 16)


class Config(SimpleNamespace):
    """As much of a `VllmConfig` as the classes ask for."""

    def with_hf_config(self, hf_config: Any) -> Config:
        return _config(hf_config, self.parallel_config.tensor_parallel_size)


def _config(hf_config: Any, tp: int) -> Config:
    text = hf_config.get_text_config()
    ssm = getattr(text, "mamba_ssm_cache_dtype", None) or getattr(text, "mamba_ssm_dtype", "auto")
    return Config(
        model_config=SimpleNamespace(
            hf_config=hf_config, hf_text_config=text, dtype=torch.bfloat16
        ),
        cache_config=SimpleNamespace(
            mamba_cache_dtype="auto",
            mamba_ssm_cache_dtype=ssm,
            use_replayssm=False,
            use_kda_recoverssm=False,
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=tp),
        speculative_config=None,
        num_speculative_tokens=0,
    )


def _states(written: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(written))
        try:
            hf_config = get_config(folder, trust_remote_code=False)
        except ValueError:  # its class is in the checkpoint
            hf_config = PreTrainedConfig.from_dict(written)
    (architecture,) = written["architectures"]
    try:
        model = ModelRegistry.models[architecture].load_model_cls()
    except ImportError as error:
        return {"missing": str(error)}
    found: dict[str, Any] = {}
    for tp in TP_SIZES:
        config = _config(hf_config, tp)
        try:
            shapes = model.get_mamba_state_shape_from_config(config)
        except AssertionError:  # vLLM does not divide
            found[str(tp)] = None
            continue
        dtypes = model.get_mamba_state_dtype_from_config(config)
        found[str(tp)] = [list(shapes), [str(dtype) for dtype in dtypes]]
    return found


if __name__ == "__main__":
    print(json.dumps({name: _states(one) for name, one in json.load(sys.stdin).items()}))
