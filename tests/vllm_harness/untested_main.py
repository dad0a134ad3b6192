"""What the connector makes of caches that no CPU runs, by vLLM's own specs. Runs beside vLLM.

Says of each, by its name here, what is refused without ``allow_untested``, and which layer is made
with it; and whether vLLM's own views of a page's scales lie where the layout says.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils import deep_gemm
from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVQuantMode,
    MLAAttentionSpec,
    SlidingWindowSpec,
    SparseCacheRole,
)

from restow.agents.engines.common.blocks import UnwrittenTokens
from restow.agents.engines.vllm.worker.kv_caches import FoundCache
from restow.agents.engines.vllm.worker.model_from_specs import rank_model
from restow.agents.engines.vllm.worker.rank_layout import LayerCache, rank_layout
from restow.agents.engines.vllm.worker.untested_forms import INDEX_PARTS_BYTES
from restow.agents.engines.vllm.worker.worker_side import zero_tokens
from restow.broker.errors import RestowError
from restow.broker.families import ConvLayout, EngineSettings, IndexerSpec, KvOrder, ModelSpec

DIM, HEADS, TOKENS, PAGES = 32, 2, 16, 3
COMMON: dict[str, Any] = {"block_size": TOKENS, "head_size": DIM, "dtype": torch.uint8}
BY_TOKEN = FullAttentionSpec(
    **COMMON,
    num_kv_heads=HEADS,
    kv_quant_mode=KVQuantMode.FP8_PER_TOKEN_HEAD,
    state_content_bytes=2 * DIM + 8,
)
WINDOW = SlidingWindowSpec(
    **COMMON,
    num_kv_heads=HEADS,
    sliding_window=8,
    kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD,
    state_content_bytes=2 * DIM + 8,
)
LATENT: dict[str, Any] = {"block_size": TOKENS, "num_kv_heads": 1, "dtype": torch.uint8}
INDEX = MLAAttentionSpec(**LATENT, head_size=132, cache_role=SparseCacheRole.INDEXER)
BLOCKS = MLAAttentionSpec(
    **LATENT,
    head_size=576,
    kv_quant_mode=KVQuantMode.FP8_PER_TENSOR,
    cache_dtype_str="fp8_ds_mla",
    state_content_bytes=656,
)
IN_ORDER = SimpleNamespace(uses_shuffled_layout=False)
CASES: dict[str, tuple[Any, Any]] = {
    "float8 by token": (BY_TOKEN, SimpleNamespace(kv_cache_dtype="fp8_per_token_head")),
    "int8 by token, window": (WINDOW, SimpleNamespace(kv_cache_dtype="int8_per_token_head")),
    "index": (INDEX, IN_ORDER),
    "latents by block": (BLOCKS, None),
    "index, shuffled": (INDEX, SimpleNamespace(uses_shuffled_layout=True)),
    "index that does not say": (INDEX, None),
    "index in bfloat16": (replace(INDEX, head_size=128, dtype=torch.bfloat16), IN_ORDER),
    "index, compressed": (replace(INDEX, tokens_per_state=4), IN_ORDER),
    "latents by block, other size": (replace(BLOCKS, state_content_bytes=584), None),
    "nvfp4": (replace(BY_TOKEN, kv_quant_mode=KVQuantMode.NVFP4), None),
    "int4 by token": (replace(BY_TOKEN, kv_quant_mode=KVQuantMode.INT4_PER_TOKEN_HEAD), None),
    "by token, other size": (replace(BY_TOKEN, state_content_bytes=2 * DIM + 4), None),
}


def main() -> None:
    """Print all answers."""
    with tempfile.TemporaryDirectory() as folder:
        config = AutoConfig.for_model("llama", num_hidden_layers=2, num_key_value_heads=HEADS)
        config.architectures = ["LlamaForCausalLM"]
        config.save_pretrained(folder)
        engine = EngineArgs(
            folder, skip_tokenizer_init=True, max_model_len=128
        ).create_engine_config()

    def made(spec: Any, module: Any, allowed: bool) -> str:
        cache = LayerCache(
            "layers.0.x",
            0,
            "group",
            torch.zeros(1),
            parts_bytes=INDEX_PARTS_BYTES
            if getattr(spec, "cache_role", None) is SparseCacheRole.INDEXER
            else (),
        )
        found = [FoundCache(cache, spec, module)]
        return f"{rank_model('m', None, found, engine, ConvLayout.SD, '', allowed).layers}"

    answers: dict[str, Any] = {
        name: [_words(made, *case, allowed) for allowed in (False, True)]
        for name, case in CASES.items()
    }
    if hasattr(deep_gemm, "mqa_logits_use_mx_scales"):
        own, deep_gemm.mqa_logits_use_mx_scales = deep_gemm.mqa_logits_use_mx_scales, lambda: True
        answers["index of SM100"] = _words(made, INDEX, IN_ORDER, True)
        deep_gemm.mqa_logits_use_mx_scales = own
    latent = FoundCache(LayerCache("layers.0.y", 0, "group", torch.zeros(1)), BLOCKS, None)
    index = LayerCache("layers.0.x", 0, "g", torch.zeros(1), parts_bytes=INDEX_PARTS_BYTES)
    both = [latent, FoundCache(index, INDEX, IN_ORDER)]
    model = rank_model("m", None, both, engine, ConvLayout.SD, "", True)
    answers["both of a layer"] = sorted(type(one).__name__ for one in model.layers)

    for order in ("HND", "NHD"):
        answers[f"scales, {order}"] = _scales_lie_where_the_layout_says(order, engine)
    answers["zeroed"] = _zeroes_the_tokens_of_an_index()
    print(json.dumps(answers))


def _scales_lie_where_the_layout_says(order: str, engine: Any) -> bool:
    """Return whether vLLM's views of the scales are the layout's shards."""
    row = 2 * DIM + 8
    shape = (PAGES, HEADS, TOKENS, row)
    whole = torch.zeros(PAGES * HEADS * TOKENS * row, dtype=torch.uint8)
    tensor = whole.view(shape)
    if order == "NHD":
        tensor = whole.view(PAGES, TOKENS, HEADS, row).transpose(1, 2)
    impl = SimpleNamespace(_k_scale_cache=None, _v_scale_cache=None)
    TritonAttentionImpl._ensure_scale_caches(impl, tensor)
    module = SimpleNamespace(kv_cache_dtype="fp8_per_token_head")

    cache = LayerCache("layers.0.x", 0, "group", tensor, 1, KvOrder(order))
    found = [FoundCache(cache, BY_TOKEN, module)]
    model = rank_model("m", None, found, engine, ConvLayout.SD, "", True)
    regions = rank_layout(model, EngineSettings(), 0, [cache])
    right = True
    for name, view in (("k", impl._k_scale_cache), ("v", impl._v_scale_cache)):
        shard = next(one for one in regions.layout.shards if one.field == f"layers.0.{name}_scale")
        for page, token, head in ((0, 0, 0), (1, 5, 1), (PAGES - 1, TOKENS - 1, HEADS - 1)):
            whole.zero_()
            view[page, token, head] = 1.5
            at = page * regions.layout.regions[0].page_stride_bytes + shard.offset_bytes
            at += token * (shard.token_stride_bytes or 0) + head * shard.strides_bytes[0]
            right &= bool(whole[at : at + 4].view(torch.float32) == 1.5)
            right &= int(whole.count_nonzero()) == int(whole[at : at + 4].count_nonzero())
    return right


def _zeroes_the_tokens_of_an_index() -> bool:
    """Return whether exactly the bytes of some tokens are zeroed, by the layout's shards."""
    tensor = torch.full((PAGES, 1, TOKENS, 132), 0xA5, dtype=torch.uint8)
    cache = LayerCache("layers.0.x", 0, "group", tensor, parts_bytes=INDEX_PARTS_BYTES)
    spec = IndexerSpec(0, INDEX_PARTS_BYTES[0])
    regions = rank_layout(ModelSpec("m", (spec,)), EngineSettings(), 0, [cache])
    zero_tokens(cache, UnwrittenTokens("group", 1, 3, 7))
    expected = torch.full((PAGES, TOKENS * 132), 0xA5, dtype=torch.uint8)
    for shard, size in zip(regions.layout.shards, INDEX_PARTS_BYTES, strict=True):
        for token in range(3, 7):
            at = shard.offset_bytes + token * (shard.token_stride_bytes or 0)
            expected[1, at : at + size] = 0
    return bool(torch.equal(tensor.view(PAGES, -1), expected))


def _words(ask: Any, *arguments: Any) -> str:
    try:
        return f"{ask(*arguments)}"
    except RestowError as error:
        return f"{error.reason}: {error.message}"


if __name__ == "__main__":
    main()
