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


def untested_layer(
    name: str, layer: int, spec: Any, module: Any, allow_untested: bool
) -> IndexerSpec | BlockScaledMlaSpec | None:
    """Return the layer of a kind that only the specs describe; None: the cache is of another kind.

    Raises `EngineUnsupportedError` where its elements may lie otherwise.
    """
    made: IndexerSpec | BlockScaledMlaSpec
    if is_index(spec):  # vLLM `DeepseekV32IndexerCache`
        made, what = IndexerSpec(layer, INDEX_PARTS_BYTES[0]), "an indexer's cache"
    elif getattr(spec, "cache_dtype_str", None) == "fp8_ds_mla":
        made, what = BlockScaledMlaSpec(layer), "a cache of type fp8_ds_mla"
    else:
        return None
    row_bytes = sum(field.shape[0] * dtype.itemsize_bytes for field, dtype in made.parts())
    found, tokens = spec.state_content_size_bytes, spec.tokens_per_state
    mx_scales = getattr(deep_gemm, "mqa_logits_use_mx_scales", None)  # from vLLM 0.33
    if (found, tokens, spec.model_version) != (row_bytes, 1, None):
        why = f"has {found} bytes for {tokens} tokens in place of {row_bytes} for 1"
    elif is_index(spec) and getattr(module, "uses_shuffled_layout", None) is not False:
        why = "belongs to a layer that does not say that its tokens lie in order"
    elif is_index(spec) and mx_scales is not None and mx_scales():
        why = "has scales in the form of SM100's kernels, which other GPUs do not read"
    else:
        check_allowed(name, what, allow_untested)
        return made
    raise unsupported_layer(name, f"{what} {why}, so where its elements lie is not known")
