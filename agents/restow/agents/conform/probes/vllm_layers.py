"""The shape of a layer by vLLM's own functions; runs in vLLM's environment."""

from __future__ import annotations

import linecache
import os
import traceback
from typing import Any

import torch
from vllm.model_executor.layers.mamba import mamba_mixer2, mamba_utils
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

from .asking import Asked, RefusedError

KV_HEADS_BESIDE = 8
"""KV heads of a hybrid model's attention layers, on which no connector's conv slices depend."""


def kv_heads(asked: Asked) -> int:
    """Return the heads of K and V before tensor parallelism."""
    return asked.sizes.get("kv_heads", KV_HEADS_BESIDE)


def page_bytes(asked: Asked) -> tuple[int, int]:
    """Return the bytes of a page at P and at D, without the padding of hybrid models."""
    sides = ((asked.p_tp, asked.p_drafts), (asked.d_tp, asked.d_drafts))
    if asked.attention:
        p_spec, d_spec = (_attention_spec(asked, tp) for tp, _ in sides)
    else:
        p_spec, d_spec = (mamba_spec(asked, *side) for side in sides)
    return int(p_spec.page_size_bytes), int(d_spec.page_size_bytes)


def _attention_spec(asked: Asked, tp: int) -> Any:
    """Return the spec in vLLM's `LBHNC`: head, token, K beside V."""
    return FullAttentionSpec(
        block_size=asked.page_tokens,
        num_kv_heads=max(1, kv_heads(asked) // tp),
        head_size=asked.sizes["head_dim"],
        dtype=torch.bfloat16,
    )


def mamba_spec(asked: Asked, tp: int, drafts: int) -> Any:
    """Return the spec of a rank's state in the requested conv layout."""
    os.environ["VLLM_SSM_CONV_STATE_LAYOUT"] = asked.conv_layout
    mamba_utils.get_conv_state_layout.cache_clear()
    shape, n = mamba_utils.MambaStateShapeCalculator, asked.sizes
    if asked.family == "mamba2":
        shapes, kind = (
            shape.mamba2_state_shape(
                tp_world_size=tp,
                intermediate_size=n["heads"] * n["head_dim"],
                n_groups=n["groups"],
                num_heads=n["heads"],
                head_dim=n["head_dim"],
                state_size=n["state"],
                conv_kernel=n["conv_kernel"],
                num_spec=drafts,
            ),
            MambaAttentionBackendEnum.MAMBA2,
        )
    elif asked.family == "gdn":
        shapes, kind = (
            shape.gated_delta_net_state_shape(
                tp_world_size=tp,
                num_k_heads=n["key_heads"],
                num_v_heads=n["value_heads"],
                head_k_dim=n["key_dim"],
                head_v_dim=n["value_dim"],
                conv_kernel_size=n["conv_kernel"],
                num_spec=drafts,
            ),
            MambaAttentionBackendEnum.GDN_ATTN,
        )
    else:
        shapes, kind = (
            shape.kda_state_shape(
                tp_world_size=tp,
                num_heads=n["heads"],
                head_dim=n["head_dim"],
                conv_kernel_size=n["conv_kernel"],
                num_spec=drafts,
            ),
            MambaAttentionBackendEnum.GDN_ATTN,
        )
    return MambaSpec(
        block_size=asked.page_tokens,
        shapes=shapes,
        dtypes=(torch.bfloat16, torch.float32),
        mamba_type=kind,
    )


def channels(asked: Asked, tp: int) -> list[list[int]]:
    """Return the channels of `[x | B | C]` that vLLM's weight loader gives each rank.

    As the mixer does, the call tells the loader how far copies of one group make B and C longer.
    """
    n, loader = asked.sizes, mamba_mixer2.mamba_v2_sharded_weight_loader
    extra = mamba_utils.MambaStateShapeCalculator.extra_groups_for_head_shards(n["groups"], tp)
    inner, shared = n["heads"] * n["head_dim"], (n["groups"] + extra) * n["state"]
    grouped = (shared, extra * n["state"], n["groups"] == 1)
    weights = torch.arange(inner + 2 * n["groups"] * n["state"])
    by_rank = []
    for rank in range(tp):
        loaded = torch.nn.Parameter(
            torch.zeros((inner + 2 * shared) // tp, dtype=torch.int64), False
        )
        loader([(inner, 0, False), grouped, grouped], tp, rank)(loaded, weights)
        by_rank.append(loaded.tolist())
    return by_rank


def form(asked: Asked, drafts: int) -> dict[str, Any]:
    """Return how vLLM packs the layer."""
    if asked.attention:
        return {"kv": "HND"}
    return {"conv": asked.conv_layout, "rows": asked.sizes["conv_kernel"] - 1 + drafts}


def own_words(error: Exception) -> RefusedError:
    """Return the connector's refusal; for an assert without a message, its source line."""
    words = str(error)
    if not words:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        lines = range(frame.lineno or 1, (frame.end_lineno or frame.lineno or 1) + 1)
        words = "".join(linecache.getline(frame.filename, line) for line in lines)
    return RefusedError(f"{type(error).__name__}: {' '.join(words.split())}")
