"""Prints what vLLM's attention layers keep of each config that comes on stdin, at several TP.

Run by vLLM's Python. Models are made without memory (``meta``), on one rank that takes itself for
one of many. A config's line is a list by TP of layers ``[number, heads, key, value, seen, dtype]``,
``seen`` being how many tokens before it the next one of a long prompt sees, 0: all; or of why vLLM
makes no such model.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")

import torch
from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import registry
from vllm.model_executor.models.utils import extract_layer_index
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager

LONG = 1 << 30
READ_WEIGHTS = ("apertus", "bloom")
"""Models that look at their weights while they are made, and so have some."""


def _config(config: dict[str, Any], folder: Path) -> VllmConfig:
    model_type = config["model_type"]
    if model_type not in CONFIG_MAPPING:  # its class comes with checkpoints
        names = {"num_hidden_layers": "num_layers"} if model_type == "exaone" else {}
        members = {"model_type": model_type, "attribute_map": names}
        own = type("Own", (PretrainedConfig,), members)
        AutoConfig.register(model_type, own, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    arguments = EngineArgs(
        model=str(folder), skip_tokenizer_init=True, load_format="dummy", max_model_len=64
    )
    return arguments.create_engine_config()


def _layers(config: VllmConfig, tp: int) -> list[list[Any]]:
    config.parallel_config.tensor_parallel_size = tp
    config.model_config.verify_with_parallel_config(config.parallel_config)
    made = config.compilation_config.static_forward_context
    made.clear()
    group = parallel_state._TP
    group.world_size, group.rank_in_group = tp, tp - 1
    device = "cpu" if config.model_config.hf_text_config.model_type in READ_WEIGHTS else "meta"
    try:
        with torch.device(device), set_default_torch_dtype(config.model_config.dtype):
            initialize_model(vllm_config=config)
    finally:
        group.world_size, group.rank_in_group = 1, 0
    found = []
    for name, layer in made.items():
        if not isinstance(layer, Attention) or layer.kv_sharing_target_layer_name is not None:
            continue
        spec = layer.get_kv_cache_spec(config)
        window = getattr(spec, "sliding_window", None)
        manager = SimpleNamespace(sliding_window=window, extra_retained_tokens=0)
        skipped = SlidingWindowManager.get_num_skipped_tokens(manager, LONG) if window else LONG
        shape = (spec.num_kv_heads, spec.head_size, spec.head_size_v, LONG - skipped)
        dtype = str(spec.dtype).removeprefix("torch.")
        found.append([extract_layer_index(name), *shape, dtype])
    return sorted(found)


def _by_tp(config: dict[str, Any], tps: list[int], folder: Path) -> list[Any]:
    try:
        made = _config(config, folder)
    except Exception as error:  # noqa: BLE001  (what it says is the answer)
        return [f"{type(error).__name__}: {error}"] * len(tps)
    found: list[Any] = []
    with set_current_vllm_config(made):
        if parallel_state._TP is None:
            store = f"file://{tempfile.mkdtemp()}/store"
            parallel_state.init_distributed_environment(1, 0, store, 0, backend="gloo")
            parallel_state.initialize_model_parallel(1, 1)
        window = made.cache_config.sliding_window
        for tp in tps:
            made.cache_config.sliding_window = window  # which some models change
            try:
                found.append(_layers(made, tp))
            except Exception as error:  # noqa: BLE001
                found.append(f"{type(error).__name__}: {error}")
    return found


def main() -> None:
    """Answer every line with a line."""
    registry._run_in_subprocess = lambda function: function()
    tps = [int(tp) for tp in sys.argv[1:]]
    for line in sys.stdin:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(_by_tp(json.loads(line), tps, Path(folder))), flush=True)


if __name__ == "__main__":
    main()
