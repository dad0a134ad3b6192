"""What the connector refuses of vLLM's specs, where no family knows the model. Runs beside vLLM.

Says of each cache, by its name here, with which reason and words, or which layer was made of it.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoConfig
from vllm.config.multimodal import MultiModalConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    SparseCacheRole,
)

from restow.agents.engines.common.registration import ConnectorSettings
from restow.agents.engines.vllm.connector import RestowConnector
from restow.agents.engines.vllm.engine_checks import (
    check_engine,
    check_groups,
    check_prefix,
    check_windows,
)
from restow.agents.engines.vllm.worker.kv_caches import FoundCache, layer_caches
from restow.agents.engines.vllm.worker.model_from_specs import rank_model
from restow.agents.engines.vllm.worker.rank_layout import DraftLayers, LayerCache, LayerNumbers
from restow.broker.errors import RestowError
from restow.broker.families import ConvLayout

TOKENS: dict[str, Any] = {
    "block_size": 16,
    "num_kv_heads": 1,
    "head_size": 32,
    "dtype": torch.float32,
}
FULL = FullAttentionSpec(**TOKENS)
FLOAT8 = replace(FULL, dtype=torch.uint8, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)
LATENT = MLAAttentionSpec(**TOKENS)
STATES = MambaSpec(16, ((3, 96), (4, 8, 16)), (torch.float32, torch.float32))
SPECS = {
    "full": FULL,
    "window": SlidingWindowSpec(**TOKENS, sliding_window=8),
    "a full cache's window": replace(FULL, sliding_window=8),
    "latent": LATENT,
    "chunked": ChunkedLocalAttentionSpec(**TOKENS, attention_chunk_size=8),
    "window of latents": SlidingWindowMLASpec(**TOKENS, sliding_window=8),
    "index": replace(LATENT, cache_role=SparseCacheRole.INDEXER),
    "compressed": replace(LATENT, tokens_per_state=4),
    "pooled": replace(FULL, tokens_per_state=Fraction(1, 4)),
    "packed": replace(FULL, state_content_bytes=100),
    "slots": replace(FULL, num_head_slots=4),
    "float8 of no layer": FLOAT8,
    "nvfp4": replace(FLOAT8, kv_quant_mode=KVQuantMode.NVFP4),
    "scales per token": replace(FLOAT8, kv_quant_mode=KVQuantMode.FP8_PER_TOKEN_HEAD),
    "bytes": replace(FULL, dtype=torch.uint8),
    "values": replace(FULL, head_size_v=16),
    "heads": replace(FULL, num_kv_heads=2),
    "states": STATES,
}
MODULE = SimpleNamespace(sliding_window=None)
SCALED = {
    word: SimpleNamespace(kv_cache_dtype=word, _k_scale_float=0.5, _v_scale_float=1.0)
    for word in ("fp8", "fp8_e5m2", "fp8_inc")
}
"""Layers that write float8, by the type that they were asked for."""


def main() -> None:
    """Print all answers."""
    with tempfile.TemporaryDirectory() as folder:
        config = AutoConfig.for_model("llama", num_hidden_layers=2, num_key_value_heads=2)
        config.architectures = ["LlamaForCausalLM"]
        config.save_pretrained(folder)
        arguments = EngineArgs(folder, skip_tokenizer_init=True, max_model_len=128)
        engine = arguments.create_engine_config()
    # Of so many ranks no process runs: nothing is asked but numbers.
    engine.parallel_config.tensor_parallel_size = 2

    def made(*found: FoundCache) -> str:
        return f"{rank_model('llama', None, found, engine, ConvLayout.SD).layers}"

    answers = {name: _words(made, _found(spec)) for name, spec in SPECS.items()}
    for word, module in SCALED.items():
        answers[word] = _words(made, _found(FLOAT8, module=module))
    answers["twice"] = _words(made, _found(FULL, "a.0.x"), _found(FULL, "b.0.x"))
    for kind in (EncoderOnlyAttentionSpec, CrossAttentionSpec):
        answers[kind.__name__] = _words(check_groups, _groups(kind(**TOKENS)))
    for name in ("chunked", "window of latents"):
        answers[f"group of {name}"] = _words(check_groups, _groups(SPECS[name]))
    for name in ("window", "a full cache's window", "full"):
        answers[f"{name}, kept"] = _words(check_windows, _keeping(True), _groups(SPECS[name]))
    freed_late = replace(SPECS["window"], extra_retained_tokens=1)
    answers["window and more, kept"] = _words(check_windows, _keeping(True), _groups(freed_late))
    answers["window and more"] = _words(check_windows, _keeping(False), _groups(freed_late))
    diverging = vars(RestowConnector)["supports_divergent_local_hybrid_hits"].fget
    for name in ("window", "full"):
        holder = SimpleNamespace(_kv_cache_config=_groups(SPECS[name]), _scheduler=None)
        answers[f"{name}, diverging"] = _words(diverging, holder)
    holder._scheduler = SimpleNamespace(wants_whole_hits=True)
    answers["full, a state among its keys"] = _words(diverging, holder)
    telling = ConnectorSettings.of({"prefix": "find+tell"})
    for policy, caching in (("fail", True), ("recompute", False), ("recompute", True)):
        asked = _words(check_prefix, _keeping(caching, policy), telling)
        answers[f"prefix, {policy}, {caching}"] = asked
    answers["prefix off"] = _words(check_prefix, _keeping(False), ConnectorSettings())
    answers["sharing"] = _words(_own_caches, ("layers.0.x", "layers.1.x"), "layers.0.x")
    answers["one cache"] = _words(_own_caches, ("layers.0.x", "layers.1.x"), None)
    answers["no number"] = _words(_own_caches, ("a.0.b.1",), None)
    for option in ("enable_cumem_allocator", "enable_sleep_mode"):
        setattr(engine.model_config, option, True)
        answers[option] = _words(check_engine, engine)
        setattr(engine.model_config, option, False)
    is_asked = hasattr(KVConnectorBase_V1, "unregister_kv_caches")
    answers["is asked before memory is given back"] = f"{is_asked}"
    for kind in ("shm", "lru"):
        engine.model_config.multimodal_config = MultiModalConfig(mm_processor_cache_type=kind)
        answers[f"images in {kind}"] = _words(check_engine, engine)
    answers["sleeps"] = _words(RestowConnector.supports_sleep_mode, None)
    answers["gives memory back"] = _words(RestowConnector.unregister_kv_caches, None)
    engine.parallel_config.decode_context_parallel_size = 2
    answers["context parallel"] = _words(check_engine, engine)
    print(json.dumps(answers))


def _own_caches(names: tuple[str, ...], last_reads: str | None) -> list[str]:
    """Return the layers that have a cache of their own, of layers that share one tensor."""
    modules = {names[-1]: SimpleNamespace(kv_sharing_target_layer_name=last_reads)}
    tensors = dict.fromkeys(names, torch.zeros(4, 1, 16, 64))
    return [
        one.cache.name
        for one in layer_caches(
            _groups(LATENT, *names), tensors, modules, LayerNumbers(0, {}), DraftLayers()
        )
    ]


def _words(ask: Any, *arguments: Any) -> str:
    try:
        return f"{ask(*arguments)}"
    except RestowError as error:
        return f"{error.reason}: {error.message}"


def _found(spec: Any, name: str = "layers.0.x", module: Any = MODULE) -> FoundCache:
    shapes = spec.shapes if isinstance(spec, MambaSpec) else ()
    cache = LayerCache(name, 0, "group", torch.zeros(1), state_shapes=shapes)
    return FoundCache(cache, spec, module)


def _keeping(caching: bool, policy: str = "fail") -> Any:
    """Return the settings of a D's config that say whether it keeps prefixes."""
    transfer = SimpleNamespace(
        is_kv_consumer=True, kv_connector_extra_config={}, kv_load_failure_policy=policy
    )
    cache = SimpleNamespace(enable_prefix_caching=caching)
    return SimpleNamespace(kv_transfer_config=transfer, cache_config=cache)


def _groups(spec: Any, *names: str) -> KVCacheConfig:
    return KVCacheConfig(4, [], [KVCacheGroupSpec(list(names) or ["layers.0.x"], spec)])


if __name__ == "__main__":
    main()
