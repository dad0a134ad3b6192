"""Builds models in vLLM without weights, and prints what cache each of their layers asks for.

Run by vLLM's interpreter: ``built_layers.py FOLDER TP,TP,...`` with a folder of configs, one a
folder. As on the last of so many ranks, where the model can be cut into so many: its group is told
another size, and nothing is computed.
"""

from __future__ import annotations

import json
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.utils import get_model_architecture
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype

_backend_of = current_platform.get_attn_backend_cls


def _dense_backend(selected_backend: Any, attn_selector_config: Any, **named: Any) -> str:
    """Return the CPU's backend, which computes no sparse attention: the caches are alike."""
    dense = attn_selector_config._replace(use_sparse=False)
    return str(_backend_of(selected_backend, attn_selector_config=dense, **named))


def built_layers(config: VllmConfig, tp: int) -> dict[str, dict[str, Any]]:
    """Return the caches of all layers, by vLLM's names of them."""
    config.compilation_config.static_forward_context.clear()
    make, _ = get_model_architecture(config.model_config)
    group = parallel_state.get_tp_group()
    with (
        mock.patch.object(group, "world_size", tp),
        mock.patch.object(group, "rank_in_group", tp - 1),
        mock.patch.object(current_platform, "get_attn_backend_cls", _dense_backend),
        set_current_vllm_config(config),
        torch.device("meta"),
        set_default_torch_dtype(torch.bfloat16),
    ):
        make(vllm_config=config, prefix="")
        found = {}
        for name, layer in get_layers_from_vllm_config(config, AttentionLayerBase).items():
            spec = layer.get_kv_cache_spec(config)
            if spec is not None:
                found[name] = {
                    "kind": type(spec).__name__,
                    "role": str(getattr(getattr(spec, "cache_role", None), "value", "")),
                    "dtype": str(spec.dtype).removeprefix("torch."),
                    "heads": spec.num_heads,
                    "token_bytes": spec.page_size_bytes / spec.block_size,
                }
        return found


def main(folder: Path, tps: list[int]) -> None:
    """Print the caches of every config, one JSON object a line."""
    with tempfile.TemporaryDirectory() as here, set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(1, 0, f"file://{here}/rendezvous", 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1)
    for model in sorted(folder.iterdir()):
        try:
            for tp, caches in _of_model(model, tps):
                print(json.dumps([model.name, tp, caches]), flush=True)
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):
            print(f"{model.name}: {traceback.format_exc()}", file=sys.stderr)  # the others go on


def _of_model(model: Path, tps: list[int]) -> Iterator[tuple[int, dict[str, dict[str, Any]]]]:
    arguments = EngineArgs(
        str(model),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=256,
        dtype="bfloat16",
    )
    config = arguments.create_engine_config()
    heads = config.model_config.model_arch_config.total_num_attention_heads
    for tp in (tp for tp in tps if heads % tp == 0):
        yield tp, built_layers(config, tp)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(tp) for tp in sys.argv[2].split(",")])
