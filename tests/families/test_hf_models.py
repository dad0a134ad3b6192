"""Configs of further model types against their configuration classes, saved and bare."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from restow.broker.errors import LayoutFormError
from restow.broker.families import (
    AttentionSpec,
    GdnSpec,
    IndexerSpec,
    KdaSpec,
    LayerSpec,
    LinearAttentionSpec,
    Mamba1Spec,
    Mamba2Spec,
    MlaSpec,
    ModelSpec,
    ShortConvSpec,
)
from restow.broker.families.hf import model_from_hf_config
from restow.broker.layout import DType

BF16 = DType.BFLOAT16
Expected = dict[str, Callable[[Any], LayerSpec]]


def _gqa(head_dim: Callable[[Any], int]) -> Callable[[Any], LayerSpec]:
    return lambda c: AttentionSpec(0, c.num_key_value_heads, head_dim(c), BF16)


def _by_heads(config: Any) -> int:
    return int(config.hidden_size // config.num_attention_heads)


def _own_or_share(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or _by_heads(config))


def _gdn(config: Any) -> GdnSpec:
    return GdnSpec(
        0,
        config.linear_num_key_heads,
        config.linear_num_value_heads,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
        config.linear_conv_kernel_dim,
        BF16,
        BF16,
    )


def _mamba1(config: Any) -> Mamba1Spec:
    sizes = config.intermediate_size, config.state_size, config.conv_kernel
    return Mamba1Spec(0, *sizes, BF16, BF16)


GDN: Expected = {"linear_attention": _gdn, "full_attention": _gqa(_own_or_share)}


def _mla(config: Any) -> LayerSpec:
    return MlaSpec(0, config.kv_lora_rank + config.qk_rope_head_dim, BF16)


CASES: dict[str, tuple[str, list[dict[str, Any]], Expected]] = {
    # class, changes to its defaults, what a layer of each type keeps
    "mamba": (
        "MambaConfig",
        [{}, {"hidden_size": 64, "expand": 3, "state_size": 8, "num_hidden_layers": 2}],
        {"": _mamba1},
    ),
    "mamba2": (
        "Mamba2Config",
        [{}, {"num_heads": 16, "head_dim": 8, "hidden_size": 64, "n_groups": 2}],
        {
            "": lambda c: Mamba2Spec(
                0, c.num_heads, c.head_dim, c.state_size, c.n_groups, c.conv_kernel, BF16, BF16
            )
        },
    ),
    "jamba": (
        "JambaConfig",
        [{}, {"attn_layer_period": 3, "attn_layer_offset": 0, "mamba_d_conv": 3}],
        {
            "mamba": lambda c: Mamba1Spec(
                0,
                c.mamba_expand * c.hidden_size,
                c.mamba_d_state,
                c.mamba_d_conv,
                BF16,
                BF16,
            ),
            "attention": _gqa(_by_heads),
        },
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        [{}, {"num_hidden_layers": 6, "linear_num_key_heads": 4, "linear_key_head_dim": 8}],
        GDN,
    ),
    "kimi_linear": (
        "KimiLinearConfig",
        [
            {},
            {
                "num_hidden_layers": 4,
                "linear_attn_config": {
                    "kda_layers": [1, 2, 4],
                    "full_attn_layers": [3],
                    "num_heads": 4,
                    "head_dim": 16,
                    "short_conv_kernel_size": 3,
                },
            },
        ],
        {
            "linear_attention": lambda c: KdaSpec(
                0,
                c.linear_num_heads,
                c.linear_head_dim,
                c.linear_conv_kernel_dim,
                BF16,
                DType.FLOAT32,
            ),
            "full_attention": _mla,
        },
    ),
    "lfm2": (
        "Lfm2Config",
        [{}, {"full_attn_idxs": [2, 5], "num_hidden_layers": 8, "conv_L_cache": 4}],
        {
            "conv": lambda c: ShortConvSpec(0, c.hidden_size, c.conv_L_cache, BF16),
            "full_attention": _gqa(_by_heads),
        },
    ),
    "gemma3_text": (
        "Gemma3TextConfig",
        [{}, {"num_hidden_layers": 7, "sliding_window": 512, "head_dim": 32}],
        {
            "sliding_attention": lambda c: AttentionSpec(
                0, c.num_key_value_heads, c.head_dim, BF16, c.sliding_window - 1
            ),
            "full_attention": _gqa(lambda c: int(c.head_dim)),
        },
    ),
    **{
        name: (kind, [{"num_hidden_layers": 3}], {"": _mla})
        for name, kind in (
            ("axk1", "AXK1Config"),
            ("deepseek_v2", "DeepseekV2Config"),
            ("deepseek_v3", "DeepseekV3Config"),
            ("glm4_moe_lite", "Glm4MoeLiteConfig"),
            ("mistral4", "Mistral4Config"),
        )
    },
    "qwen3_5_text": (
        "Qwen3_5TextConfig",
        [{}, {"num_hidden_layers": 7, "linear_num_key_heads": 4, "head_dim": 32}],
        GDN,
    ),
    "qwen3_5_moe_text": (
        "Qwen3_5MoeTextConfig",
        [{}, {"num_hidden_layers": 5, "linear_value_head_dim": 64}],
        GDN,
    ),
    "olmo_hybrid": (
        "OlmoHybridConfig",
        [{}, {"num_hidden_layers": 3, "hidden_size": 256, "num_attention_heads": 4}],
        GDN,
    ),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        [{"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}],
        {
            "conv": lambda c: ShortConvSpec(0, c.hidden_size, c.conv_L_cache, BF16),
            "full_attention": _gqa(_by_heads),
        },
    ),
    "falcon_mamba": (
        "FalconMambaConfig",
        [{}, {"hidden_size": 64, "expand": 3, "state_size": 8}],
        {"": _mamba1},
    ),
    "minimax": (
        "MiniMaxConfig",
        [{}, {"num_hidden_layers": 3, "head_dim": 96}],
        {
            "linear_attention": lambda c: LinearAttentionSpec(
                0, c.num_attention_heads, _own_or_share(c), BF16
            ),
            "full_attention": _gqa(_own_or_share),
        },
    ),
    "minicpm3": (
        "MiniCPM3Config",
        [{"num_hidden_layers": 3}],
        {"": lambda c: AttentionSpec(0, c.num_attention_heads, c.qk_head_dim, BF16)},
    ),
}
RUNS = [(name, changes) for name, (_, all_changes, _) in CASES.items() for changes in all_changes]


@pytest.mark.parametrize(("model_type", "changes"), RUNS)
def test_what_each_layer_keeps(model_type: str, changes: dict[str, Any], tmp_path: Path) -> None:
    name, _, expected = CASES[model_type]
    config = getattr(transformers, name)(**changes)
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    kinds = getattr(config, "layers_block_type", None) if model_type == "jamba" else None
    kinds = kinds or getattr(config, "layer_types", None)
    if "" in expected or kinds is None:
        kinds = [""] * config.num_hidden_layers
    wanted = [type_and_numbers(expected[kind](config)) for kind in kinds]
    for given in (saved, {**changes, "model_type": model_type}):
        model = model_from_hf_config(given)
        assert [type_and_numbers(layer) for layer in model.layers] == wanted
        assert [layer.layer for layer in model.layers] == list(range(len(kinds)))
        assert model.depth == config.num_hidden_layers


def type_and_numbers(layer: LayerSpec) -> tuple[Any, ...]:
    """Return a layer without its place in the model and without its mixer.

    test_rebuilding checks what the mixer reads.
    """
    left_out = ("layer", "mixer")
    numbers = {slot: getattr(layer, slot) for slot in layer.__slots__ if slot not in left_out}
    return type(layer), numbers


@pytest.mark.parametrize(
    ("model_type", "name", "changes"),
    [
        ("deepseek_v32", "DeepseekV32Config", {}),
        ("glm_moe_dsa", "GlmMoeDsaConfig", {}),
        ("glm_moe_dsa", "GlmMoeDsaConfig", {"index_topk_freq": 4, "index_skip_topk_offset": 3}),
        ("glm_moe_dsa", "GlmMoeDsaConfig", {"index_topk_pattern": "FSSFSSFSS"}),
        ("hy_v4", "HYV4Config", {"layer_types": ["deepseek_sparse_attention"] * 9}),
    ],
)
def test_which_layers_have_an_indexer(
    model_type: str, name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    changes = {"num_hidden_layers": 9, **changes}
    config = getattr(transformers, name)(**changes)
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    kinds = getattr(config, "indexer_types", None) or ["full"] * 9
    latent = _mla(config)
    assert isinstance(latent, MlaSpec)
    wanted: list[LayerSpec] = []
    for layer, kind in enumerate(kinds):
        wanted.append(replace(latent, layer=layer))
        if kind == "full":
            wanted.append(IndexerSpec(layer, config.index_head_dim, 128, 64))
    for given in (saved, {**changes, "model_type": model_type}):
        assert list(model_from_hf_config(given).layers) == wanted


def test_zamba2_attends_over_twice_the_hidden_size(tmp_path: Path) -> None:
    config = transformers.Zamba2Config()
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    model = model_from_hf_config(saved)
    del saved["attention_head_dim"]  # as older checkpoints do without it
    assert model_from_hf_config(saved) == model
    mamba = [layer for layer in model.layers if isinstance(layer, Mamba2Spec)]
    attention = [layer for layer in model.layers if isinstance(layer, AttentionSpec)]
    assert [layer.layer for layer in mamba] == list(range(config.num_hidden_layers))
    assert [layer.layer for layer in attention] == config.hybrid_layer_ids
    assert {(a.kv_heads, a.head_dim) for a in attention} == {
        (config.num_key_value_heads, config.attention_head_dim)
    }
    (form,) = {(m.heads, m.head_dim, m.state, m.groups, m.conv_kernel) for m in mamba}
    assert form == (
        config.n_mamba_heads,
        config.mamba_headdim,
        config.mamba_d_state,
        config.mamba_ngroups,
        config.mamba_d_conv,
    )


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"model_type": "zamba2", "num_hidden_layers": 53}, "layer_types"),
        ({"model_type": "bailing_moe"}, "num_attention_heads"),
        ({"model_type": "lfm2", "full_attn_idxs": "all"}, "full_attn_idxs"),
        ({"model_type": "kimi_linear", "linear_attn_config": {"kda_layers": [1.5]}}, "kda_layers"),
        ({"model_type": "jamba", "attn_layer_period": 0}, "attn_layer_period"),
        ({"model_type": "qwen3_next", "layer_types": ["conv"]}, "layer_types"),
        (
            {"model_type": "jamba", "num_hidden_layers": 1, "layer_types": ["sliding_attention"]},
            "layer 0",
        ),
    ],
)
def test_a_config_that_means_nothing_names_its_key(config: dict[str, Any], key: str) -> None:
    with pytest.raises(LayoutFormError, match=key):
        model_from_hf_config(config)


def test_types_that_are_asked_for_come_first() -> None:
    types = (DType.FLOAT16, DType.FLOAT32, DType.FLOAT16)
    model: ModelSpec = model_from_hf_config({"model_type": "kimi_linear"}, *types)
    kda = next(layer for layer in model.layers if isinstance(layer, KdaSpec))
    assert (kda.conv_dtype, kda.state_dtype) == (DType.FLOAT32, DType.FLOAT16)
