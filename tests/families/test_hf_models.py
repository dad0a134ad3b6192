"""Configs of further model types against their configuration classes, saved and bare."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

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
    ShortConvSpec,
)
from restow.broker.families.hf import model_from_hf_config
from restow.broker.layout import DType

BF16 = DType.BFLOAT16
Keep = Callable[[Any], LayerSpec]
Expected = dict[str, tuple[Keep, ...]]
"""What a layer of each kind keeps; all layers are of the kind without a name, if that is there."""


def _gqa(head_dim: Callable[[Any], int]) -> Keep:
    return lambda c: AttentionSpec(0, c.num_key_value_heads, head_dim(c), BF16)


def _by_heads(config: Any) -> int:
    return int(config.hidden_size // config.num_attention_heads)


def _own_or_share(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or _by_heads(config))


def _gdn(c: Any) -> GdnSpec:
    heads = c.linear_num_key_heads, c.linear_num_value_heads
    dims = c.linear_key_head_dim, c.linear_value_head_dim
    return GdnSpec(0, *heads, *dims, c.linear_conv_kernel_dim, BF16, BF16)


def _mamba1(c: Any) -> Mamba1Spec:
    return Mamba1Spec(0, c.intermediate_size, c.state_size, c.conv_kernel, BF16, BF16)


def _jamba(c: Any) -> Mamba1Spec:
    channels = c.mamba_expand * c.hidden_size
    return Mamba1Spec(0, channels, c.mamba_d_state, c.mamba_d_conv, BF16, BF16)


def _mamba2(c: Any) -> Mamba2Spec:
    form = c.num_heads, c.head_dim, c.state_size, c.n_groups, c.conv_kernel
    return Mamba2Spec(0, *form, BF16, BF16)


def _bamba(c: Any) -> Mamba2Spec:
    """Read the names that Bamba, Granite and Falcon-H1 share."""
    form = c.mamba_n_heads, c.mamba_d_head, c.mamba_d_state, c.mamba_n_groups, c.mamba_d_conv
    return Mamba2Spec(0, *form, BF16, BF16)


def _nemotron(c: Any) -> Mamba2Spec:
    form = c.mamba_num_heads, c.mamba_head_dim, c.ssm_state_size, c.n_groups, c.conv_kernel
    return Mamba2Spec(0, *form, BF16, DType.parse(c.mamba_ssm_cache_dtype))


def _zamba2(c: Any) -> Mamba2Spec:
    form = c.n_mamba_heads, c.mamba_headdim, c.mamba_d_state, c.mamba_ngroups, c.mamba_d_conv
    return Mamba2Spec(0, *form, BF16, BF16)


def _kda(c: Any) -> KdaSpec:
    form = c.linear_num_heads, c.linear_head_dim, c.linear_conv_kernel_dim
    return KdaSpec(0, *form, BF16, DType.FLOAT32)


def _mla(c: Any) -> MlaSpec:
    return MlaSpec(0, c.kv_lora_rank + c.qk_rope_head_dim, BF16)


def _short_conv(c: Any) -> ShortConvSpec:
    return ShortConvSpec(0, c.hidden_size, c.conv_L_cache, BF16)


def _linear(c: Any) -> LinearAttentionSpec:
    return LinearAttentionSpec(0, c.num_attention_heads, _own_or_share(c), BF16)


def _window(c: Any) -> AttentionSpec:
    return AttentionSpec(0, c.num_key_value_heads, c.head_dim, BF16, c.sliding_window - 1)


FULL, SHARE = (_gqa(_own_or_share),), (_gqa(_by_heads),)
GDN: Expected = {"linear_attention": (_gdn,), "full_attention": FULL}
BAMBA: Expected = {
    "linear_attention": (_bamba,),
    "full_attention": FULL,
    "hybrid": (*FULL, _bamba),
}
NEMOTRON: Expected = {
    "linear_attention": (_nemotron,),
    "full_attention": FULL,
    "moe": (),
    "mlp": (),
}
LFM2: Expected = {"conv": (_short_conv,), "full_attention": SHARE}
KDA_LAYERS = {
    **{"kda_layers": [1, 2, 4], "full_attn_layers": [3]},
    **{"num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 3},
}
CASES: dict[str, tuple[str, list[dict[str, Any]], Expected]] = {
    # class, changes to its defaults, what a layer of each type keeps
    "mamba": (
        "MambaConfig",
        [{}, {"hidden_size": 64, "expand": 3, "state_size": 8, "num_hidden_layers": 2}],
        {"": (_mamba1,)},
    ),
    "mamba2": (
        "Mamba2Config",
        [{}, {"num_heads": 16, "head_dim": 8, "hidden_size": 64, "n_groups": 2}],
        {"": (_mamba2,)},
    ),
    "falcon_mamba": (
        "FalconMambaConfig",
        [{}, {"hidden_size": 64, "expand": 3, "state_size": 8}],
        {"": (_mamba1,)},
    ),
    "jamba": (
        "JambaConfig",
        [{}, {"attn_layer_period": 3, "attn_layer_offset": 0, "mamba_d_conv": 3}],
        {"mamba": (_jamba,), "attention": SHARE},
    ),
    "nemotron_h": (
        "NemotronHConfig",
        [
            {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"] * 3},
            {
                "layers_block_type": ["linear_attention", "full_attention"],
                **{"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 32},
                **{"n_groups": 2, "conv_kernel": 3, "num_key_value_heads": 2, "head_dim": 64},
            },
        ],
        NEMOTRON,
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        [
            {},
            {"num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"]},
            {
                **{"hidden_size": 128, "mamba_n_heads": 8, "mamba_d_head": 32},
                **{"mamba_n_groups": 2, "mamba_d_state": 16, "mamba_d_conv": 3},
                **{"num_attention_heads": 4, "num_key_value_heads": 2},
            },
        ],
        BAMBA,
    ),
    "falcon_h1": (
        "FalconH1Config",
        [
            {},
            {"num_hidden_layers": 2, "mamba_d_ssm": 4096, "mamba_n_heads": 32},
            {"num_hidden_layers": 2, "mamba_d_ssm": None, "mamba_n_heads": 64, "head_dim": 128},
        ],
        BAMBA,
    ),
    "bamba": (
        "BambaConfig",
        [
            {},
            {"num_hidden_layers": 6, "attn_layer_indices": [1, 4]},
            {"num_hidden_layers": 2, "attn_layer_indices": [0], "num_key_value_heads": None},
        ],
        BAMBA,
    ),
    "zamba2": (
        "Zamba2Config",
        [{}],
        {
            "linear_attention": (_zamba2,),
            "hybrid": (
                lambda c: AttentionSpec(0, c.num_key_value_heads, c.attention_head_dim, BF16),
                _zamba2,
            ),
        },
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        [{}, {"num_hidden_layers": 6, "linear_num_key_heads": 4, "linear_key_head_dim": 8}],
        GDN,
    ),
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
    "kimi_linear": (
        "KimiLinearConfig",
        [{}, {"num_hidden_layers": 4, "linear_attn_config": KDA_LAYERS}],
        {"linear_attention": (_kda,), "full_attention": (_mla,)},
    ),
    "lfm2": (
        "Lfm2Config",
        [{}, {"full_attn_idxs": [2, 5], "num_hidden_layers": 8, "conv_L_cache": 4}],
        LFM2,
    ),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        [{"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}],
        LFM2,
    ),
    "minimax": (
        "MiniMaxConfig",
        [{}, {"num_hidden_layers": 3, "head_dim": 96}],
        {"linear_attention": (_linear,), "full_attention": FULL},
    ),
    "gemma3_text": (
        "Gemma3TextConfig",
        [{}, {"num_hidden_layers": 7, "sliding_window": 512, "head_dim": 32}],
        {"sliding_attention": (_window,), "full_attention": FULL},
    ),
    "minicpm3": (
        "MiniCPM3Config",
        [{"num_hidden_layers": 3}],
        {"": (lambda c: AttentionSpec(0, c.num_attention_heads, c.qk_head_dim, BF16),)},
    ),
    **{
        name: (kind, [{"num_hidden_layers": 3}], {"": (_mla,)})
        for name, kind in (
            ("axk1", "AXK1Config"),
            ("deepseek_v2", "DeepseekV2Config"),
            ("deepseek_v3", "DeepseekV3Config"),
            ("glm4_moe_lite", "Glm4MoeLiteConfig"),
            ("mistral4", "Mistral4Config"),
        )
    },
}
RUNS = [(name, changes) for name, (_, all_changes, _) in CASES.items() for changes in all_changes]


@pytest.mark.parametrize(("model_type", "changes"), RUNS)
def test_what_each_layer_keeps(model_type: str, changes: dict[str, Any], tmp_path: Path) -> None:
    name, _, expected = CASES[model_type]
    config = getattr(transformers, name)(**changes)
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    lists = [getattr(config, key, None) or () for key in ("layers_block_type", "layer_types")]
    known = (kinds for kinds in lists if kinds and set(kinds) <= set(expected))
    kinds = next(known, [""] * config.num_hidden_layers)
    wanted = [
        (number, *type_and_numbers(keep(config)))
        for number, kind in enumerate(kinds)
        for keep in expected[kind]
    ]
    for given in (saved, {**changes, "model_type": model_type}):
        model = model_from_hf_config(given)
        assert [(one.layer, *type_and_numbers(one)) for one in model.layers] == wanted
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


def test_older_configs_of_zamba2_do_not_say_the_size_of_heads() -> None:
    saved = {"model_type": "zamba2", **transformers.Zamba2Config().to_dict()}
    model = model_from_hf_config(saved)
    del saved["attention_head_dim"]
    assert model_from_hf_config(saved) == model
