"""Configs that lie, of every family: refused with key and value, or laid out, never a traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from restow.broker.errors import LayoutFormError, RestowError, TpSizeError
from restow.broker.families import EngineSettings, build_layout
from restow.broker.families.hf import Readings, model_from_hf_config
from restow.broker.families.hf.config import MODELS, WHOLES
from restow.broker.layout import check_layout

SIZED = {"num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 4}
SAYING_ALL = (
    *("bailing_moe", "deepseek", "exaone", "internlm2", "internlm3", "iquestcoder", "mimo"),
    *("minicpm", "minicpmo", "minicpmv", "orion", "phi3_v", "phi4mm", "solar", "telechat3"),
)
"""Types whose configuration class comes with the checkpoint, without defaults here."""
MIMO: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hybrid_layer_pattern": [0, 1],
    "sliding_window_size": 128,
    **{f"{one}num_attention_heads": 4 for one in ("", "swa_")},
    **{f"{one}num_key_value_heads": 2 for one in ("", "swa_")},
    **{f"{one}head_dim": 64 for one in ("", "swa_")},
}
NEEDED: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {
        **SIZED,
        "layer_group_size": 2,
        "architectures": ["BailingMoeV3ForCausalLM"],
    },
    "beam": {**SIZED, "sliding_window": 8},
    "flint": {**SIZED, "sliding_window": 8, "use_sliding_window": True},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "glm4_moe": {"head_dim": 128},
    "glm4v_moe_text": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "mimo_v2": MIMO,
    "mimo_v2_flash": MIMO,
    "minimax_m1": {**SIZED, "attn_type_list": [0, 1], "num_key_value_heads": 2},
    "minimax_text_01": {**SIZED, "attn_type_list": [0, 1], "num_key_value_heads": 2},
    "nemotron-nas": {
        **SIZED,
        "block_configs": [{"attention": {"n_heads_in_group": 2}}, {"attention": {"no_op": True}}],
    },
    "step3p5": {
        **{**SIZED, "num_attention_groups": 2},
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "nemotron_h": {"hybrid_override_pattern": "M-*E"},
    "pangu_ultra_moe": {"kv_lora_rank": 512, "qk_rope_head_dim": 64},
    "qwen3_omni_moe_text": {"head_dim": 128},
    "sarvam_mla": {"kv_lora_rank": 512, "qk_rope_head_dim": 64},
    **dict.fromkeys(SAYING_ALL, SIZED),
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "num_hidden_layers": 2},
}
"""Keys without which a type means nothing, beside the number of layers."""
ODD: tuple[Any, ...] = (
    *(None, -1, 0, 3, 2**31 - 1, 10**30, 1.5, float("nan"), True, False, "", "seven", "auto"),
    *([], [1, 2], [None], ["full_attention"], ["seven"], [10**9], {}, {"a": 1}, [[]]),
)
FEW = {"num_hidden_layers": 2}
LIES = json.loads((Path(__file__).parent / "refused_configs.json").read_text())
"""Configs that lie, of all families, each with a pattern of what its refusal says."""


def good(model_type: str) -> dict[str, Any]:
    """Return a config that has every key that is read of this type, with its default."""
    bare = {"model_type": model_type, **NEEDED.get(model_type, {})}
    for config in (bare, {**bare, **FEW}, {**bare, "text_config": FEW}):
        readings = Readings()
        try:
            model_from_hf_config(config, readings=readings)
        except LayoutFormError:
            continue
        said = {one.key: one.value for one in readings if "." not in one.key}
        full = {**said, **config}
        if full.get("num_hidden_layers", 2) > 8:  # the law is one of many configs
            full = {**config, **FEW}
        return full
    pytest.fail(f"NEEDED has no keys for {model_type}")


def lay_out(config: dict[str, Any], tp: int = 1) -> None:
    check_layout(build_layout(model_from_hf_config(config), EngineSettings(tp, 64)))


@pytest.mark.parametrize("model_type", sorted(MODELS))
def test_one_odd_value_is_refused_by_its_key_or_means_something(model_type: str) -> None:
    config = good(model_type)
    lay_out(config)
    lists = {"quantization_config", "text_config", "layer_types", "layers_block_type"}
    indices = {"attn_layer_indices", "full_attn_idxs", "linear_attn_config"}
    wrong = [
        (key, value, error)
        for key in sorted({*config, *lists, *indices, "num_nextn_predict_layers"})
        for value in ODD
        if (error := _refusal({**config, key: value})) and not _names(error, key)
    ]
    assert not wrong


@pytest.mark.parametrize("model_type", sorted(WHOLES))
def test_one_odd_value_in_a_part_is_refused_by_its_path(model_type: str) -> None:
    part = good(WHOLES[model_type].text)
    config = {"model_type": model_type, "text_config": part}
    lay_out(config)
    wrong = [
        (key, value, error)
        for key in sorted({*part, "layer_types"} - {"model_type"})
        for value in ODD
        if (error := _refusal({**config, "text_config": {**part, key: value}}))
        and not (_names(error, key) and ("config: " not in error.message or _in_part(error)))
    ]
    assert not wrong


def _in_part(error: RestowError) -> bool:
    return str(error.subject.get("key", "")).startswith("text_config.")


def _refusal(config: dict[str, Any]) -> RestowError | None:
    try:
        lay_out(config)
    except RestowError as error:
        return error
    return None


def _names(error: RestowError, key: str) -> bool:
    """Return whether a refusal names the key, or the list of layers that the key counts.

    A refusal by the layout's own limits names the field, and one by sizes of TP names the heads.
    """
    if not isinstance(error, LayoutFormError) or "config" not in error.message:
        return error.reason != "INTERNAL"
    told = error.subject.get("key", "") + error.message
    return key in told or ("layer" in key and "layer_types" in told)


@pytest.mark.parametrize(
    ("config", "says"), LIES, ids=[f"{number}: {says}" for number, (_, says) in enumerate(LIES)]
)
def test_a_config_that_lies_is_refused(config: Any, says: str) -> None:
    with pytest.raises(LayoutFormError, match=says):
        model_from_hf_config(config)


@pytest.mark.parametrize(
    ("model_type", "changes", "tp", "message"),
    [
        (
            "lfm2",
            {"num_attention_heads": 12, "num_key_value_heads": 3, "hidden_size": 768},
            2,
            "3 ",
        ),
        ("gemma3_text", {"num_attention_heads": 12, "num_key_value_heads": 6, **FEW}, 4, "6 heads"),
        ("qwen3_next", {"linear_num_key_heads": 6, "linear_num_value_heads": 12}, 4, "6 "),
        ("mamba2", {"n_groups": 3, "num_heads": 96, "hidden_size": 3072}, 2, "3 groups"),
    ],
)
def test_heads_that_do_not_divide_at_this_tp(
    model_type: str, changes: dict[str, Any], tp: int, message: str
) -> None:
    with pytest.raises(TpSizeError, match=message):
        lay_out({"model_type": model_type, **changes}, tp)
