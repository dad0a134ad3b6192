"""What the connector makes of vLLM's own specs, for models that nobody loads. Runs beside vLLM.

Of each type of model and TP vLLM's config is made by vLLM, and the shapes of its states by the
model's class. Says whether layers made of these alone, at each TP, are those of the family.
"""

from __future__ import annotations

import json
import sys
import tempfile
from typing import Any

import torch
from transformers import AutoConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models.registry import ModelRegistry
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from restow.agents.engines.vllm.worker.kv_caches import FoundCache
from restow.agents.engines.vllm.worker.model_from_specs import rank_model
from restow.agents.engines.vllm.worker.rank_layout import LayerCache, dtype_of
from restow.broker.errors import RestowError
from restow.broker.families import (
    AttentionSpec,
    ConvLayout,
    EngineSettings,
    LayerSpec,
    MlaSpec,
    ModelSpec,
    RecurrentSpec,
    build_layout,
)
from restow.broker.families.hf import model_from_hf_config

TORCH = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}
KINDS = {
    "Mamba1Spec": "MAMBA1",
    "Mamba2Spec": "MAMBA2",
    "GdnSpec": "GDN_ATTN",
    "KdaSpec": "GDN_ATTN",
    "ShortConvSpec": "SHORT_CONV",
    "LinearAttentionSpec": "LINEAR",
}
"""What vLLM's layers call their states (`mamba_type`)."""


def main() -> None:
    """Answer a list of ``[model_type, architecture, changes]`` with a list of ``{tp: words}``."""
    print(json.dumps([_compared(*one) for one in json.loads(sys.argv[1])]))


def _compared(model_type: str, architecture: str, changes: dict[str, Any]) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        config = AutoConfig.for_model(model_type, **changes)
        config.architectures = [architecture]
        config.save_pretrained(folder)
        return {str(tp): _words(folder, tp) for tp in (1, 2, 4, 8, 16)}


def _words(folder: str, tp: int) -> str:
    """Return "same", or what differs or was refused."""
    arguments = EngineArgs(folder, skip_tokenizer_init=True, max_model_len=128)
    config = arguments.create_engine_config()
    # Of so many ranks no process runs: nothing is asked but numbers.
    config.parallel_config.tensor_parallel_size = tp
    text = config.model_config.hf_text_config.to_dict()
    made, _ = _made(config)
    types = (
        [dtype_of(one) for one in made.get_mamba_state_dtype_from_config(config)]
        if (hasattr(made, "get_mamba_state_dtype_from_config"))
        else [None]
    )
    known = model_from_hf_config(text, conv_dtype=types[0], ssm_dtype=types[-1])
    try:
        build_layout(known, EngineSettings(tp))
    except RestowError as error:
        return f"refused: {error.reason}"
    found = [_found(config, spec, tp) for spec in known.layers]
    try:
        said = rank_model(known.name, None, found, config, ConvLayout.SD)
        rank_model(known.name, known, found, config, ConvLayout.SD)
    except RestowError as error:
        return error.message
    if said.model().fields != known.model().fields:
        return f"{said.layers} in place of {known.layers}"
    return "same" if _boxes(said, tp) == _boxes(known, tp) else "other boxes"


def _found(config: Any, layer: LayerSpec, tp: int) -> FoundCache:
    name, shapes, spec = f"layers.{layer.layer}.x", (), _spec(config, layer)
    if isinstance(spec, MambaSpec):
        shapes = spec.shapes
    cache = LayerCache(name, layer.layer, "group", torch.zeros(1), state_shapes=shapes)
    return FoundCache(cache, spec, None)


def _spec(config: Any, layer: LayerSpec) -> Any:
    """Return what vLLM's layer of this kind says of its cache."""
    model = config.model_config
    if isinstance(layer, RecurrentSpec):
        made, _ = _made(config)
        return MambaSpec(
            block_size=16,
            shapes=tuple(made.get_mamba_state_shape_from_config(config)),
            dtypes=tuple(made.get_mamba_state_dtype_from_config(config)),
            mamba_type=MambaAttentionBackendEnum[KINDS[type(layer).__name__]],
        )
    kind, more = FullAttentionSpec, {}
    if isinstance(layer, MlaSpec):
        kind, more = MLAAttentionSpec, {"max_tp_shards": 1}
    elif isinstance(layer, AttentionSpec) and layer.window_tokens:
        kind, more = SlidingWindowSpec, {"sliding_window": model.hf_text_config.sliding_window}
    return kind(
        block_size=16,
        num_kv_heads=model.get_num_kv_heads(config.parallel_config),
        head_size=model.get_head_size(),
        dtype=TORCH[layer.dtype.label],  # type: ignore[union-attr]
        **more,
    )


def _made(config: Any) -> Any:
    model = config.model_config
    return ModelRegistry.resolve_model_cls(model.architectures, model_config=model)


def _boxes(model: ModelSpec, tp: int) -> list[dict[str, Any]]:
    layout = build_layout(model, EngineSettings(tp))
    return [{shard.field: shard.box for shard in rank.shards} for rank in layout.ranks]


if __name__ == "__main__":
    main()
