"""Caches of kinds that vLLM has on some GPUs alone, as layers of a model.

vLLM's specs and Restow's layouts determine them, and no hardware here can run them. So the
connector serves them only with the setting ``allow_untested``: scales per token and head, latents
with scales per block (``fp8_ds_mla``), and the keys of a sparse attention's indexer.
"""

from __future__ import annotations

from typing import Any

from vllm.utils import deep_gemm
from vllm.v1.kv_cache_interface import KVQuantMode, SparseCacheRole

from restow.agents.engines.common.adapter_errors import EngineUnsupportedError
from restow.agents.engines.vllm.worker.layers_from_specs import unsupported_layer
from restow.broker.families import BlockScaledMlaSpec, IndexerSpec
from restow.broker.layout import DType

TOKEN_HEAD_TYPES = {
    KVQuantMode.FP8_PER_TOKEN_HEAD: DType.FLOAT8_E4M3FN,
    KVQuantMode.INT8_PER_TOKEN_HEAD: DType.INT8,
}
"""Types with a float32 scale for each token and head, which follows the elements."""
TOKEN_HEAD_SCALE_BYTES = 2 * 4
"""Scales of a key and a value."""
INDEX_PARTS_BYTES = (128, 4)
"""In an indexer's page: float8 elements of all tokens, then a float32 scale of each."""
BLOCK_SCALED = "fp8_ds_mla"


def check_allowed(name: str, what: str, allow_untested: bool) -> None:
    """Refuse an untested kind of cache unless the operator allows it.

    Raises `EngineUnsupportedError`.
    """
    if not allow_untested:
        raise EngineUnsupportedError(
            f"{name}: {what} is untested, because no hardware of Restow's tests runs it: set "
            "allow_untested to hand it over, with the content of every handoff compared",
            layer=name,
        )


def is_index(spec: Any) -> bool:
    """Return whether a cache has the keys of a sparse attention's indexer."""
    return getattr(spec, "cache_role", None) is SparseCacheRole.INDEXER


def index_layer(name: str, layer: int, spec: Any, module: Any, allow_untested: bool) -> IndexerSpec:
    """Return the layer of an indexer's cache (vLLM `DeepseekV32IndexerCache`).

    Raises `EngineUnsupportedError` for one whose elements may lie otherwise.
    """
    row_bytes, shuffled = sum(INDEX_PARTS_BYTES), getattr(module, "uses_shuffled_layout", None)
    form = spec.state_content_size_bytes, spec.tokens_per_state, spec.num_kv_heads
    if form != (row_bytes, 1, 1) or spec.model_version is not None:
        raise unsupported_layer(
            name, f"an indexer of {form[0]} bytes for {form[1]} tokens: how they lie is missing"
        )
    if shuffled is not False:
        raise unsupported_layer(
            name, "an indexer that does not say that its keys lie in the order of tokens"
        )
    mx_scales = getattr(deep_gemm, "mqa_logits_use_mx_scales", None)  # from vLLM 0.33
    if mx_scales is not None and mx_scales():
        raise unsupported_layer(
            name, "an indexer with scales in the form of SM100's kernels, which other GPUs lack"
        )
    check_allowed(name, "an indexer's cache", allow_untested)
    return IndexerSpec(layer, INDEX_PARTS_BYTES[0])


def block_scaled_layer(
    name: str, layer: int, spec: Any, allow_untested: bool
) -> BlockScaledMlaSpec | None:
    """Return the layer of latents with scales per block; None: the cache is of another kind.

    Raises `EngineUnsupportedError`.
    """
    if getattr(spec, "cache_dtype_str", None) != BLOCK_SCALED:
        return None
    made = BlockScaledMlaSpec(layer)
    row_bytes = sum(field.shape[0] * dtype.itemsize_bytes for field, dtype in made.parts())
    found = spec.state_content_size_bytes, spec.tokens_per_state, spec.model_version
    if found != (row_bytes, 1, None):
        raise unsupported_layer(
            name, f"{BLOCK_SCALED} with {found[0]} bytes a token in place of {row_bytes}"
        )
    check_allowed(name, f"a cache of type {BLOCK_SCALED}", allow_untested)
    return made
