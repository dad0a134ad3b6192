"""Layers of MTP, as many as the engine runs, of the types whose config says what they keep."""

from __future__ import annotations

from typing import Any

import pytest

from restow.broker.errors import LayoutFormError
from restow.broker.families import AttentionSpec, EngineSettings, LayerSpec, MlaSpec, build_layout
from restow.broker.families.hf import model_from_hf_config
from restow.broker.layout import DType, check_layout
from restow.broker.planner import make_plan

BF16 = DType.BFLOAT16
NEXTN = "num_nextn_predict_layers"
GQA = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64, "head_dim": 16}
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_hidden_layers": 3}
CASES: list[tuple[dict[str, Any], int, LayerSpec]] = [
    ({"model_type": "deepseek_v3", **LATENT, NEXTN: 1}, 3, MlaSpec(3, 576, BF16)),
    ({"model_type": "glm4_moe_lite", **LATENT, NEXTN: 1}, 3, MlaSpec(3, 576, BF16)),
    (
        {"model_type": "glm4_moe", **GQA, "num_hidden_layers": 4, NEXTN: 1},
        4,
        AttentionSpec(4, 2, 16, BF16),
    ),
    (
        {"model_type": "mimo", **GQA, "num_hidden_layers": 4, NEXTN: 1},
        4,
        AttentionSpec(4, 2, 8, BF16),  # Qwen2's heads: shares of the hidden size
    ),
    (
        {"model_type": "qwen3_next", **GQA, "num_hidden_layers": 8},
        8,
        AttentionSpec(8, 2, 16, BF16),
    ),
    (
        {
            "model_type": "qwen3_5",
            "text_config": {"model_type": "qwen3_5_text", **GQA, "num_hidden_layers": 8},
        },
        8,
        AttentionSpec(8, 2, 16, BF16),
    ),
]


@pytest.mark.parametrize(
    ("config", "depth", "layer"), CASES, ids=[one[0]["model_type"] for one in CASES]
)
def test_a_draft_layer_is_one_more_with_full_attention(
    config: dict[str, Any], depth: int, layer: LayerSpec
) -> None:
    plain = model_from_hf_config(config)
    model = model_from_hf_config(config, draft_layers=1)
    assert (model.layers, model.depth) == (plain.layers, depth) == (plain.layers, plain.depth)
    assert model.draft_layers == (layer,)
    layouts = [build_layout(one, EngineSettings(tp=2)) for one in (plain, model)]
    for one in layouts:
        check_layout(one)
    plan = make_plan(layouts[0], build_layout(model, EngineSettings(tp=1)))
    assert plan.cold == {field.name for field in layer.fields()}


@pytest.mark.parametrize(
    ("config", "count", "words"),
    [
        ({"model_type": "deepseek_v3", **LATENT, NEXTN: 1}, 2, f"{NEXTN}: 1 is not as many"),
        ({"model_type": "deepseek_v3", **LATENT}, 1, NEXTN),
        ({"model_type": "mimo", **GQA, "num_hidden_layers": 4, NEXTN: "one"}, 1, f"{NEXTN}: 'one'"),
        ({"model_type": "llama", **GQA, "num_hidden_layers": 4, NEXTN: 1}, 1, "of a 'llama'"),
    ],
)
def test_what_no_config_says_is_refused(config: dict[str, Any], count: int, words: str) -> None:
    with pytest.raises(LayoutFormError, match=words):
        model_from_hf_config(config, draft_layers=count)
