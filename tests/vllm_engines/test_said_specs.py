"""Layers made of vLLM's own specs are those that the families make of configs, at every TP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_harness.programs import answers

pytestmark = pytest.mark.timeout(600)
EAGER = {"TORCH_COMPILE_DISABLE": "1"}
TPS = ("1", "2", "4", "8", "16")
MODELS: list[tuple[str, str, dict[str, Any]]] = [
    # model_type, vLLM's class of it, changes to its defaults
    ("mamba", "MambaForCausalLM", {"num_hidden_layers": 2}),
    ("mamba2", "Mamba2ForCausalLM", {"num_hidden_layers": 2}),
    ("jamba", "JambaForCausalLM", {"num_hidden_layers": 8}),
    (
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        {"layer_types": ["mamba", "attention"], "num_hidden_layers": 2},
    ),
    ("qwen3_next", "Qwen3NextForCausalLM", {"num_hidden_layers": 4}),
    (
        "lfm2",
        "Lfm2ForCausalLM",
        {"full_attn_idxs": [2, 5], "num_hidden_layers": 8, "conv_dim": 2560},
    ),
    ("gemma3_text", "Gemma3ForCausalLM", {"num_hidden_layers": 7, "sliding_window": 512}),
    ("deepseek_v3", "DeepseekV3ForCausalLM", {"num_hidden_layers": 2}),
]


REFUSED = {
    "chunked": "ENGINE_UNSUPPORTED: layers.0.x: the content of a cache of kind Chunked",
    "window of latents": "ENGINE_UNSUPPORTED: layers.0.x: the content of a cache of kind Sli",
    "index": "ENGINE_UNSUPPORTED: layers.0.x: an indexer's cache has 128 bytes for 1 tokens in",
    "compressed": "ENGINE_UNSUPPORTED: layers.0.x: MLAAttentionSpec with tokens_per_state 4",
    "pooled": "ENGINE_UNSUPPORTED: layers.0.x: FullAttentionSpec with tokens_per_state 1/4",
    "packed": "ENGINE_UNSUPPORTED: layers.0.x: FullAttentionSpec with state_content_size_bytes 100",
    "slots": "ENGINE_UNSUPPORTED: layers.0.x: FullAttentionSpec with num_head_slots 4",
    "float8 of no layer": "ENGINE_UNSUPPORTED: layers.0.x: KV of type None (FP8_PER_TENSOR) is",
    "nvfp4": "ENGINE_UNSUPPORTED: layers.0.x: KV of type None (NVFP4) is not",
    "scales per token": "ENGINE_UNSUPPORTED: layers.0.x: KV with scales per token and head (None)",
    "fp8_inc": "ENGINE_UNSUPPORTED: layers.0.x: KV of type fp8_inc (FP8_PER_TENSOR) is",
    "bytes": "ENGINE_UNSUPPORTED: layers.0.x: KV in torch.uint8: what its elements",
    "values": "ENGINE_UNSUPPORTED: layers.0.x: keys of 32 and values of 16",
    "heads": "ENGINE_UNSUPPORTED: layers.0.x: vLLM gives a rank of TP 2 2 KV heads, and",
    "states": "ENGINE_UNSUPPORTED: layers.0.x: how TP 2 cuts states of ((3, 96), (4, 8, 16)) is",
    "twice": "ENGINE_UNSUPPORTED: b.0.x: a.0.x is layer 0, too",
    "EncoderOnlyAttentionSpec": "ENGINE_UNSUPPORTED: caches of kind EncoderOnlyAttentionSpec",
    "CrossAttentionSpec": "ENGINE_UNSUPPORTED: caches of kind CrossAttentionSpec",
    "group of chunked": "ENGINE_UNSUPPORTED: attention in chunks, of which vLLM keeps only the",
    "group of window of latents": "ENGINE_UNSUPPORTED: caches of kind SlidingWindowMLASpec",
    "window, kept": "None",
    "full, kept": "None",
    "a full cache's window, kept": "ENGINE_UNSUPPORTED: prefix caching, and sliding windows whose",
    "window and more, kept": "ENGINE_UNSUPPORTED: prefix caching, and sliding windows whose",
    "window and more": "None",
    "window, diverging": "False",
    "full, diverging": "True",
    "full, a state among its keys": "False",
    "one cache": "CACHE_UNKNOWN: layers.1.x and layers.0.x have one cache",
    "no number": "ENGINE_UNSUPPORTED: a.0.b.1: the layer's number",
    "prefix, fail, True": "ENGINE_UNSUPPORTED: prefix is find+tell, and kv_load_failure_policy",
    "prefix, recompute, False": "ENGINE_UNSUPPORTED: prefix is find+tell, and prefix caching",
    "prefix, recompute, True": "None",
    "prefix off": "None",
    "enable_sleep_mode": "ENGINE_UNSUPPORTED: enable_sleep_mode: an engine that sleeps gives its",
    "images in shm": "ENGINE_UNSUPPORTED: mm_processor_cache_type is shm: the engine core then",
    "images in lru": "None",
    "sleeps": "False",
    "gives memory back": "ENGINE_UNSUPPORTED: the memory of the KV caches may not be given back",
    "context parallel": "ENGINE_UNSUPPORTED: decode_context_parallel_size is 2",
}
"""How what is said of them begins: every one names the layer or setting, and what is missing."""


def test_families_and_specs_say_the_same(vllm_python: Path) -> None:
    found = answers(vllm_python, "said_main.py", json.dumps(MODELS), **EAGER)[-1]
    wrong = {
        (name, tp): words
        for (name, _, _), by_tp in zip(MODELS, found, strict=True)
        for tp, words in by_tp.items()
        # What no TP of the family's can have, vLLM has none of either.
        if words not in ("same", "refused: TP_SIZE_NOT_ALLOWED")
    }
    assert not wrong
    assert all(by_tp["2"] == "same" and tuple(by_tp) == TPS for by_tp in found)


def test_what_specs_leave_open_is_refused_by_name(vllm_python: Path) -> None:
    found = answers(vllm_python, "refused_main.py", **EAGER)[-1]
    # vLLM 0.33 asks the connector before it gives memory back.
    asked = found.pop("is asked before memory is given back") == "True"
    refused = "ENGINE_UNSUPPORTED: enable_cumem_allocator: this version"
    assert found.pop("enable_cumem_allocator").startswith("None" if asked else refused)
    for name, words in REFUSED.items():
        assert found.pop(name).startswith(words)
    assert found.pop("sharing") == "['layers.0.x']"
    for word, dtype in (("fp8", "FLOAT8_E4M3FN"), ("fp8_e5m2", "FLOAT8_E5M2")):
        assert f"dtype=<DType.{dtype}" in found[word]
        assert "fingerprint='k 0.5, v 1.0'" in found.pop(word)
    # The rest is served; a full cache has the window that its layer has, not its group's.
    windows = {
        name: "window_tokens=7" in words for name, words in found.items() if "Mla" not in words
    }
    assert windows == {"full": False, "window": True, "a full cache's window": False}
    assert found["latent"].startswith("(MlaSpec(layer=0, latent_dim=32")
