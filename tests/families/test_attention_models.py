"""Models with attention alone: what their configs say, against what vLLM 0.32 makes of them.

``attention_of_vllm.json`` holds configs, and the layers that vLLM's own model code makes of them
(`vllm_harness/attention_layers.py`; `vllm_engines/test_layers_of_vllm.py` asks again).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from restow.broker.families import AttentionSpec, EngineSettings, build_layout
from restow.broker.families.hf import model_from_hf_config
from restow.broker.families.hf.attention import MODELS
from restow.broker.layout import DType, Span
from restow.broker.layout.check_whole import check_layout
from restow.broker.planner.program import GroupPair, PageForm

ROOT = Path(__file__).parents[2]
ANSWERS = json.loads((ROOT / "tests/families/attention_of_vllm.json").read_text())
"""Lists of a config and its layers ``[numbers, heads, key, value, seen, dtype]``."""

NAMES = [f"{index}-{config['model_type']}" for index, (config, _) in enumerate(ANSWERS)]


def kept(config: dict[str, Any]) -> list[list[Any]]:
    """Return the families' layers in the form of vLLM's answers."""
    rows: dict[tuple[Any, ...], list[int]] = {}
    for layer in model_from_hf_config(config).layers:
        assert isinstance(layer, AttentionSpec)
        dims = layer.dims
        form = (layer.kv_heads, dims["k"], dims["v"], layer.window_tokens, layer.dtype.label)
        rows.setdefault(form, []).append(layer.layer)
    return [[numbers, *form] for form, numbers in rows.items()]


@pytest.mark.parametrize(("config", "layers"), ANSWERS, ids=NAMES)
def test_layers_are_those_of_vllm(config: dict[str, Any], layers: list[list[Any]]) -> None:
    assert kept(config) == layers


def test_every_type_is_among_them() -> None:
    asked = {config["model_type"] for config, _ in ANSWERS}
    # Made only by vLLM's models for images too, or by a class that comes with checkpoints, or
    # (Flint) with FlashInfer alone.
    unasked = {"ernie4_5_vl_moe_text", "flint", "nemotron-nas", "step3p7_text"}
    assert set(MODELS) - asked == unasked


FLINT = {
    **{"model_type": "flint", "num_hidden_layers": 3, "num_attention_heads": 32},
    **{"num_key_value_heads": 4, "head_dim": 128, "hidden_size": 2048, "sliding_window": 513},
}


@pytest.mark.parametrize(
    ("more", "seen"),
    [
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, [0, 512, 0]),
        ({"layer_types": ["sliding_attention"] * 3, "use_sliding_window": False}, [0, 0, 0]),
        ({}, [0, 0, 0]),
    ],
)
def test_flint_has_windows_where_its_list_says_unless_they_are_off(
    more: dict[str, Any], seen: list[int]
) -> None:
    # vLLM 0.33 `models/flint`, which was read and not run.
    layers = model_from_hf_config({**FLINT, **more}).layers
    assert [layer.window_tokens for layer in layers] == seen  # type: ignore[union-attr]
    assert kept({**FLINT, **more})[0][1:4] == [4, 128, 128]


def test_no_page_is_named_that_vllm_has_let_go_of() -> None:
    config = {"model_type": "mistral", "num_hidden_layers": 1, "sliding_window": 32}
    (field, _) = model_from_hf_config(config).model().fields
    form = PageForm("window", 16, 1)
    for position in range(1, 200):
        # vLLM `SlidingWindowManager.get_num_skipped_tokens`: whole pages of these are null.
        skipped = max(0, position - 32 + 1)
        pages = GroupPair(form, form, field.window_tokens).src_pages(0, position)
        assert pages == range(skipped // 16, -(-position // 16)), position


def test_blocks_of_nemotron_nas_have_queries_in_groups_of_their_own_size() -> None:
    blocks = [{"attention": {"n_heads_in_group": 8}}, {"attention": {"no_op": True}}]
    blocks += [{"attention": {"n_heads_in_group": 16, "no_op": False}}]
    config = {"model_type": "nemotron-nas", "num_hidden_layers": 3, "num_attention_heads": 64}
    model = model_from_hf_config({**config, "hidden_size": 8192, "block_configs": blocks})
    assert [(one.layer, one.fields()[1].shape) for one in model.layers] == [
        (0, (8, 128)),
        (2, (4, 128)),
    ]
    assert model.depth == 3


MIMO = {"model_type": "mimo_v2_flash", "num_hidden_layers": 2, "hybrid_layer_pattern": [0, 1]}


@pytest.mark.parametrize("packed", [True, False])
def test_values_of_another_width_follow_the_keys_of_their_head(packed: bool) -> None:
    config = {
        **MIMO,
        **{f"{prefix}num_attention_heads": 16 for prefix in ("", "swa_")},
        "num_key_value_heads": 4,
        "swa_num_key_value_heads": 8,
        **{f"{prefix}head_dim": 192 for prefix in ("", "swa_")},
        **{f"{prefix}v_head_dim": 128 for prefix in ("", "swa_")},
        "sliding_window_size": 128,
    }
    settings = EngineSettings(tp=2, page_tokens=16, kv_packed=packed)
    layout = build_layout(model_from_hf_config(config), settings)
    check_layout(layout)
    full, sliding = (layout.ranks[1].shards[at : at + 2] for at in (0, 2))
    assert [one.box for one in full] == [(Span(2, 4), Span(0, 192)), (Span(2, 4), Span(0, 128))]
    assert [one.box[0] for one in sliding] == [Span(4, 8)] * 2
    assert [one.offset_bytes for one in full] == [0, 192 * 2 if packed else 0]
    # vLLM: [pages, heads, tokens, K and V], (head_size + head_size_v) elements each.
    strides = [one.token_stride_bytes for one in full]
    assert strides == ([320 * 2] * 2 if packed else [192 * 2, 128 * 2])
    sizes = {one.name: one.page_stride_bytes for one in layout.ranks[1].regions}
    if packed:
        assert sizes == {"layers.0.kv": 2 * 16 * 320 * 2, "layers.1.kv": 4 * 16 * 320 * 2}
    assert {one.window_tokens for one in layout.model.fields} == {0, 127}
    assert layout.ranks[0].shards[0].dtype is DType.BFLOAT16
