"""Models with attention alone: what their configs say, against what vLLM 0.32 makes of them.

``attention_of_vllm.json`` holds configs, and the layers that vLLM's own model code makes of them
(`vllm_harness/attention_layers.py`; `vllm_engines/test_layers_of_vllm.py` asks again).
"""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from restow.broker.errors import LayoutFormError, UnknownModelError
from restow.broker.families import AttentionSpec, EngineSettings, build_layout
from restow.broker.families.hf import model_from_hf_config
from restow.broker.families.hf.attention import MODELS
from restow.broker.families.hf.config import WHOLES
from restow.broker.layout import DType, Span
from restow.broker.layout.check_whole import check_layout
from restow.broker.planner.program import GroupPair, PageForm

ROOT = Path(__file__).parents[2]
NESTED = {name: whole for name, whole in WHOLES.items() if whole.text in MODELS}
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
    # Made only by vLLM's models for images too, or by a class that comes with checkpoints.
    unasked = {"ernie4_5_vl_moe_text", "nemotron-nas", "step3p7_text"}
    assert set(MODELS) - asked == unasked


def test_the_docs_name_every_type() -> None:
    page = (ROOT / "docs" / "layouts.md").read_text()
    known = {*MODELS, *NESTED}
    said = {name for name in known if f"`{name}`" in page}
    assert {name for name in known - said if name.removesuffix("_text") not in NESTED} == set()
    assert f"with attention alone {len(known)} types" in (ROOT / "README.md").read_text()


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


LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "sliding_window": 16,
}
FIXED = {name for name, whole in NESTED.items() if whole.fixed}
ALONE = {name for name, whole in NESTED.items() if whole.alone}


@pytest.mark.parametrize("model_type", sorted({*NESTED} - FIXED - ALONE))
def test_a_text_part_is_read_as_if_it_stood_alone(model_type: str) -> None:
    whole = model_from_hf_config({"model_type": model_type, "text_config": LLAMA})
    assert whole.layers == model_from_hf_config(LLAMA).layers
    assert (whole.name, whole.depth) == ("llama", 3)  # as vLLM calls it
    with pytest.raises(LayoutFormError, match="text_config"):
        model_from_hf_config({"model_type": model_type})
    with pytest.raises(UnknownModelError, match=r"text_config\.model_type 'perceptron' \(in a '"):
        model_from_hf_config(
            {"model_type": model_type, "text_config": {"model_type": "perceptron"}}
        )


@pytest.mark.parametrize("model_type", sorted(FIXED))
def test_a_part_is_read_as_the_whole_config_names_it_whatever_the_part_says(
    model_type: str,
) -> None:
    # The configuration class of the whole makes the part's, and does not ask for the part's type.
    text = {**LLAMA, "head_dim": 16, "num_kv_shared_layers": 0}
    config = CONFIG_MAPPING[model_type](text_config=deepcopy(text)).get_text_config()
    assert type(config).model_type == NESTED[model_type].text
    whole = model_from_hf_config({"model_type": model_type, "text_config": text})
    own = {**text, "model_type": NESTED[model_type].text}
    assert whole.layers == model_from_hf_config(own).layers
    assert whole.name == config.model_type  # as vLLM calls it
    with pytest.raises(LayoutFormError, match="text_config"):
        model_from_hf_config({"model_type": model_type})


def test_step_3_7_has_its_own_defaults_for_a_part_that_is_called_as_step_3_5() -> None:
    part = {"model_type": "step3p5", "num_hidden_layers": 2}
    model = model_from_hf_config({"model_type": "step3p7", "text_config": part})
    assert model.name == "step3p5"  # as vLLM calls it
    assert model.layers == model_from_hf_config({**part, "model_type": "step3p7_text"}).layers


def test_older_configs_have_the_text_beside_the_rest() -> None:
    text = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4}
    flat = model_from_hf_config({"model_type": "qwen2_5_vl", **text, "num_key_value_heads": 2})
    assert [one.fields()[0].shape for one in flat.layers] == [(2, 16)] * 4


MIMO = {"model_type": "mimo_v2_flash", "num_hidden_layers": 2, "hybrid_layer_pattern": [0, 1]}
SHARED = {"model_type": "gemma3n_text", "num_hidden_layers": 4}
NAS = {"model_type": "nemotron-nas", "num_hidden_layers": 1, "num_attention_heads": 8}
STEP = {
    "model_type": "step3p5",
    "num_hidden_layers": 1,
    "layer_types": ["full_attention"],
    "num_attention_heads": 4,
    "num_attention_groups": 2,
    "head_dim": 16,
}


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"model_type": "llama", "num_attention_heads": 6, "num_key_value_heads": 4}, "num_key_v"),
        (
            {"model_type": "llama", "hidden_size": 100, "num_attention_heads": 32},
            "hidden_size: 100",
        ),
        ({"model_type": "llama", "layer_types": ["full_attention"]}, "layer_types lists 1"),
        ({"model_type": "llama", "per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config"),
        ({"model_type": "mistral", "sliding_window": 1}, "sliding_window: 1"),
        ({"model_type": "mistral", "sliding_window": "4k"}, "sliding_window: '4k'"),
        ({"model_type": "internlm2"}, "num_attention_heads"),
        ({"model_type": "gemma3", "text_config": 7}, "text_config: 7"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 8},
            "max_window_layers",
        ),
        (
            {
                "model_type": "gpt_oss",
                "num_hidden_layers": 2,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            "layer_types",
        ),
        ({"model_type": "exaone_moe", "sliding_windows": [128]}, "sliding_windows"),
        (
            {
                "model_type": "smollm3",
                "use_sliding_window": True,
                "sliding_window": 8,
                "no_rope_layers": [1],
            },
            "no_rope_layers",
        ),
        ({"model_type": "llama4_text", "layer_types": ["chunked_attention"]}, "layer_types"),
        ({**MIMO, "hybrid_layer_pattern": [0]}, "hybrid_layer_pattern"),
        ({**MIMO, "hybrid_layer_pattern": [0, 2]}, "hybrid_layer_pattern"),
        ({**MIMO, "num_attention_heads": 4, "num_key_value_heads": 3}, "num_key_value_heads: 3"),
        ({**SHARED, "num_kv_shared_layers": 3}, "num_kv_shared_layers: 3"),
        ({**SHARED, "num_kv_shared_layers": -1}, "num_kv_shared_layers: -1"),
        (
            {"model_type": "gemma4_text", "num_hidden_layers": 7, "num_kv_shared_layers": 2},
            "num_kv_shared_layers: 2",
        ),
        ({"model_type": "gemma4_text", "use_bidirectional_attention": "all"}, "bidirectional"),
        ({**NAS, "block_configs": []}, "block_configs"),
        ({**NAS, "block_configs": [{"attention": {"n_heads_in_group": 3}}]}, "n_heads_in_group: 3"),
        (
            {**NAS, "block_configs": [{"attention": {"replace_with_linear": True}}]},
            "replace_with_linear",
        ),
        ({**STEP, "attention_other_setting": {"attention_type": 1}}, "attention_type"),
    ],
)
def test_a_config_that_lies_names_its_key(config: dict[str, Any], key: str) -> None:
    with pytest.raises(LayoutFormError, match=key):
        model_from_hf_config(config)


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
