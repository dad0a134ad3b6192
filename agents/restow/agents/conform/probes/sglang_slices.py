"""Ask SGLang what ranks of P write, by its own functions.

Its mooncake and nixl backends cut alike. The shapes of states come from its configuration classes,
the slices from `disaggregation/utils.py`, the pairs of ranks from `disaggregation/common`.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, field
from importlib.metadata import version
from types import ModuleType, SimpleNamespace
from typing import Any, List, Optional, Tuple  # noqa: UP035

import numpy as np

from .asking import Asked, Copied, NotAskedError, Place, RefusedError, answer_all
from .sources import folder_of, take

CONFIGS = {"mamba2": "NemotronHConfig", "gdn": "Qwen3NextConfig", "kda": "KimiLinearConfig"}
FILES = {"mamba2": "nemotron_h.py", "gdn": "qwen3_next.py", "kda": "kimi_linear.py"}
ITEM_BYTES = (2, 4)
"""Sizes in the conv state, bfloat16, and in the recurrent state, float32."""


class Sources:
    """The functions that are asked."""

    def __init__(self) -> None:
        """Compile the functions."""
        self._srt = folder_of("sglang") / "srt"
        typing = {"List": List, "Optional": Optional, "Tuple": Tuple}  # noqa: UP006
        self.slices = take(
            self._srt / "disaggregation" / "utils.py",
            "should_send_replicated_state",
            "compute_mamba_state_slice_blocks",
            "compute_mamba_state_slice_byte_blocks",
            known=typing,
        )
        common = self._srt / "disaggregation" / "common"
        self.heads = take(
            common / "staging_buffer.py",
            "compute_head_slice_params",
            "resolve_total_kv_heads",
        )
        # The method imports these by this name.
        sys.modules["sglang.srt.disaggregation.common.staging_buffer"] = self.heads
        self.manager = take(
            common / "conn.py",
            "CommonKVManager._resolve_rank_mapping",
            "CommonKVManager._get_mha_head_slice_blocks",
            "CommonKVManager.get_mha_kv_ptrs_with_pp",
            known={"np": np, "logger": SimpleNamespace(warning_once=logging.getLogger().debug)},
        )

    def shape(self, asked: Asked, tp: int) -> Any:
        """Return the state's shape on one rank, by the model's configuration class."""
        shapes = take(
            self._srt / "configs" / "mamba_utils.py",
            "extra_groups_for_head_shards",
            "Mamba2StateShape",
            "KimiLinearStateShape",
            known={"dataclass": dataclass, "field": field, "divide": _divide},
        )
        config = take(
            self._srt / "configs" / FILES[asked.family],
            f"{CONFIGS[asked.family]}.mamba2_cache_params",
            known={
                **vars(shapes),
                "_is_cpu": False,
                "linear_attn_tp_size": lambda: tp,
                "get_parallel": lambda: SimpleNamespace(attn_tp_size=tp),
                "mamba2_state_dtype": lambda config: None,
                "Mamba2CacheParams": SimpleNamespace,
                "KimiLinearCacheParams": SimpleNamespace,
            },
        )
        return config.mamba2_cache_params(SimpleNamespace(**_config(asked))).shape


def _divide(whole: int, parts: int) -> int:
    if whole % parts:
        raise RefusedError(f"{whole} is not divisible by {parts}")
    return whole // parts


def _config(asked: Asked) -> dict[str, Any]:
    """Return a model's configuration with the names of its own class."""
    n = asked.sizes
    if asked.family == "kda":
        linear = {
            "num_heads": n["heads"],
            "head_dim": n["head_dim"],
            "short_conv_kernel_size": n["conv_kernel"],
        }
        return {"linear_attn_config": linear, "linear_layer_ids": [0]}
    if asked.family == "gdn":
        return {
            "linear_key_head_dim": n["key_dim"],
            "linear_num_key_heads": n["key_heads"],
            "linear_value_head_dim": n["value_dim"],
            "linear_num_value_heads": n["value_heads"],
            "linear_conv_kernel_dim": n["conv_kernel"],
            "linear_layer_ids": [0],
        }
    return {
        "mamba_num_heads": n["heads"],
        "mamba_head_dim": n["head_dim"],
        "n_groups": n["groups"],
        "ssm_state_size": n["state"],
        "conv_kernel": n["conv_kernel"],
        "mamba_layer_ids": [0],
    }


def _sources_of(sources: Sources, asked: Asked, dst_rank: int) -> list[int]:
    """Return the ranks of P that serve a rank of D."""
    decode = SimpleNamespace(
        kv_args=SimpleNamespace(engine_rank=dst_rank),
        attn_tp_size=asked.d_tp,
        attn_cp_size=1,
        attn_cp_rank=0,
        pp_size=1,
        pp_rank=0,
        is_mla_backend=False,
        is_hybrid_mla_backend=False,
    )
    prefill = SimpleNamespace(attn_tp_size=asked.p_tp, attn_cp_size=1, pp_size=1)
    sources.manager._resolve_rank_mapping(decode, prefill)
    ranks: list[int] = prefill.target_tp_ranks
    return ranks


def _states(sources: Sources, asked: Asked) -> Copied:
    """Return copies of the conv state, followed by the recurrent state."""
    if asked.conv_layout == "SD" or asked.p_drafts or asked.d_drafts:
        raise NotAskedError("it has one order for each kind of layer, and no rows for drafts")
    shapes = [sources.shape(asked, tp) for tp in (asked.p_tp, asked.d_tp)]
    axis = getattr(shapes[0], "conv_slice_axis", 0)
    groups = shapes[0].conv_shard_groups
    copies: list[Place] = []
    starts = [0, 0]
    for item_bytes, pair, cut, parts in (
        (ITEM_BYTES[0], [shape.conv[0] for shape in shapes], axis, groups),
        (ITEM_BYTES[1], [shape.temporal for shape in shapes], 0, None),
    ):
        sizes = [int(np.prod(shape)) * item_bytes for shape in pair]
        for dst_rank in range(asked.d_tp):
            for src_rank in _sources_of(sources, asked, dst_rank):
                blocks = sources.slices.compute_mamba_state_slice_byte_blocks(
                    src_item_len=sizes[0],
                    dst_item_len=sizes[1],
                    src_dim=pair[0][cut],
                    dst_dim=pair[1][cut],
                    outer_count=int(np.prod(pair[0][:cut])),
                    src_attn_tp_size=asked.p_tp,
                    dst_attn_tp_size=asked.d_tp,
                    dst_tp_rank_in_group=dst_rank,
                    local_tp_rank_in_group=src_rank,
                    conv_shard_groups=parts,
                )
                copies += [
                    (src_rank, dst_rank, starts[0] + src, starts[1] + dst, length)
                    for src, dst, length in blocks
                ]
        starts = [start + size for start, size in zip(starts, sizes, strict=True)]
    rows = shapes[0].conv[0][1 - axis]
    form = {"conv": "SD" if axis else "DS", "rows": rows}
    return Copied(form, form, (starts[0], starts[1]), copies)


def _heads(sources: Sources, asked: Asked) -> Copied:
    """Return copies of K and V, each in a pool of its own."""
    total, copies = asked.sizes["kv_heads"], []
    sizes = [
        max(1, total // tp) * asked.page_tokens * asked.sizes["head_dim"] * ITEM_BYTES[0]
        for tp in (asked.p_tp, asked.d_tp)
    ]
    for dst_rank in range(asked.d_tp):
        for src_rank in _sources_of(sources, asked, dst_rank):
            prefill = SimpleNamespace(
                pp_size=1,
                attn_tp_size=asked.p_tp,
                kv_args=SimpleNamespace(
                    engine_rank=src_rank,
                    page_size=asked.page_tokens,
                    total_kv_head_num=total,
                    swa_kv_cache_layout="nhd",
                    prefill_start_layer=0,
                ),
            )
            prefill.get_mha_kv_ptrs_with_pp = _bound(
                sources.manager, "get_mha_kv_ptrs_with_pp", prefill
            )
            blocks = sources.manager._get_mha_head_slice_blocks(
                prefill,
                [0, sizes[0]],
                [sizes[0]] * 2,
                [0, sizes[1]],
                [sizes[1]] * 2,
                np.zeros(1, np.int32),
                np.zeros(1, np.int32),
                asked.d_tp,
                dst_rank,
            )
            copies += [
                (src_rank, dst_rank, int(src), int(dst), int(length))
                for src_offsets, dst_offsets, length in blocks
                for src, dst in zip(src_offsets, dst_offsets, strict=True)
            ]
    return Copied({"kv": "NHD"}, {"kv": "NHD"}, (2 * sizes[0], 2 * sizes[1]), copies)


def _bound(module: ModuleType, name: str, owner: Any) -> Any:
    return lambda *arguments: getattr(module, name)(owner, *arguments)


if __name__ == "__main__":
    sources = Sources()
    answer_all(
        version("sglang"), lambda asked: (_heads if asked.attention else _states)(sources, asked)
    )
