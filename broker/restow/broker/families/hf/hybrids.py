"""Models with recurrent layers: Mamba, delta nets, KDA, linear attention, short convolutions."""

from __future__ import annotations

from dataclasses import replace

from restow.broker.families.hf.attention import Layers, ModelTable, layers_by_kind
from restow.broker.families.hf.keys import ConfigKeys
from restow.broker.families.hf.kv_types import Types
from restow.broker.families.hf.latent import latent
from restow.broker.families.recurrent import (
    GdnSpec,
    KdaSpec,
    LinearAttentionSpec,
    Mamba1Spec,
    Mamba2Spec,
    Mixer,
    ShortConvSpec,
)
from restow.broker.layout import DType

LING_3 = "BailingMoeV3ForCausalLM"
_BAILING = ("BailingMoeV2_5ForCausalLM", LING_3)


Name = str | tuple[str, ...]
"""A key, or several names of the key."""


def _mamba1_layer(
    keys: ConfigKeys, types: Types, channels: int, names: tuple[Name, Name], mixer: Mixer
) -> Mamba1Spec:
    """Return a Mamba1 layer; ``names`` are the keys of its state and its taps."""
    state, taps = keys.number(names[0]), keys.number(names[1], least=2)
    return Mamba1Spec(0, channels, state, taps, types.conv, types.state(keys), mixer)


def _mamba2_layer(
    keys: ConfigKeys,
    types: Types,
    shape: tuple[int, int],
    names: tuple[Name, Name, Name],
    mixer: Mixer,
) -> Mamba2Spec:
    """Return a Mamba2 layer of ``shape``: heads and their size.

    ``names`` are the keys of its state, groups and taps.
    """
    state, groups = keys.number(names[0]), keys.number(names[1])
    taps = keys.number(names[2], least=2)
    return Mamba2Spec(0, *shape, state, groups, taps, types.conv, types.state(keys), mixer)


def _nemotron_h(keys: ConfigKeys, types: Types) -> Layers:
    """Nemotron-H: a layer is Mamba2, attention, MLP or experts, by a pattern or a list."""
    lists = ("layers_block_type", "layer_types", "hybrid_override_pattern")
    key = next((k for k in lists if keys.has(k)), None)
    if key is None:
        raise keys.fault("hybrid_override_pattern", " is missing, and so is layers_block_type")
    kinds = keys.kinds(key)
    if keys.has("num_hidden_layers"):
        kinds = keys.as_many(key, kinds, keys.number("num_hidden_layers"))
    attention = types.attention(keys.kv_heads(), keys.number(("head_dim", "attention_head_dim")))
    heads, head_dim = keys.number("mamba_num_heads"), keys.number("mamba_head_dim")
    names = "ssm_state_size", ("n_groups", "mamba_n_groups"), ("conv_kernel", "mamba_d_conv")
    ssm_dtype = types.state(keys, "mamba_ssm_cache_dtype", DType.FLOAT32)
    mamba = _mamba2_layer(keys, types, (heads, head_dim), names, types.mixer(keys, "use_bias"))
    mamba = replace(mamba, ssm_dtype=ssm_dtype)
    return layers_by_kind(keys, kinds, attention, mamba)


def _granite(keys: ConfigKeys, types: Types) -> Layers:
    """Granite 4: Mamba2 layers with attention layers among them."""
    return _mamba_names(keys, types, keys.layer_kinds(), _channels(keys))


def _bamba(keys: ConfigKeys, types: Types) -> Layers:
    """Bamba: the same as Granite, with the attention layers listed by number."""
    count = keys.number("num_hidden_layers")
    listed = keys.indices("attn_layer_indices", range(count))
    kinds = keys.listed_kinds(count) or [
        "attention" if i in listed else "recurrent" for i in range(count)
    ]
    return _mamba_names(keys, types, kinds, _channels(keys))


def _falcon_h1(keys: ConfigKeys, types: Types) -> Layers:
    """Falcon-H1: attention and Mamba2 side by side in every layer."""
    unsized = "mamba_d_ssm" in keys.config and not keys.has("mamba_d_ssm")
    channels = _channels(keys) if unsized else keys.number("mamba_d_ssm")
    # The scaled product is rounded differently from a plain product.
    why = "the in-projection is scaled by multipliers (ssm_multipliers)"
    kinds = ["both"] * keys.number("num_hidden_layers")
    return _mamba_names(keys, types, kinds, channels, why)


def _channels(keys: ConfigKeys) -> int:
    return keys.number("mamba_expand") * keys.number("hidden_size")


def _mamba_names(
    keys: ConfigKeys, types: Types, kinds: list[str], channels: int, obstacle: str = ""
) -> Layers:
    """Return layers by the names that Bamba, Granite and Falcon-H1 share."""
    heads = keys.number("mamba_n_heads")
    if channels % heads:
        raise keys.fault("mamba_n_heads", f" {heads} does not divide the {channels} channels")
    head_dim = channels // heads
    if keys.config.get("mamba_d_head", "auto") not in ("auto", None):
        head_dim = keys.number("mamba_d_head")
        if head_dim * heads != channels:
            problem = f" {head_dim} for mamba_n_heads {heads} are not the {channels} channels"
            raise keys.fault("mamba_d_head", problem)
    mixer = types.mixer(keys, "mamba_proj_bias", obstacle)
    names = "mamba_d_state", "mamba_n_groups", "mamba_d_conv"
    mamba = _mamba2_layer(keys, types, (heads, head_dim), names, mixer)
    attention = types.attention(keys.kv_heads(), keys.head_dim())
    return layers_by_kind(keys, kinds, attention, mamba)


def _zamba2(keys: ConfigKeys, types: Types) -> Layers:
    """Zamba2: Mamba2 everywhere, and in hybrid layers attention over twice the hidden size."""
    hidden = keys.number("hidden_size")
    channels = keys.number("mamba_expand") * hidden
    if keys.has("attention_head_dim"):
        head_dim = keys.number("attention_head_dim")
    else:
        head_dim = keys.share("num_attention_heads", 2 * hidden, "twice the hidden_size")
    mamba_dim = keys.share("n_mamba_heads", channels, "mamba_expand times hidden_size")
    shape, mixer = (channels // mamba_dim, mamba_dim), types.mixer(keys, "add_bias_linear")
    names = "mamba_d_state", "mamba_ngroups", "mamba_d_conv"
    mamba = _mamba2_layer(keys, types, shape, names, mixer)
    attention = types.attention(keys.kv_heads(), head_dim)
    return layers_by_kind(keys, keys.layer_kinds(), attention, mamba)


def _mamba(keys: ConfigKeys, types: Types) -> Layers:
    """Mamba and Falcon-Mamba: Mamba1 in every layer."""
    if keys.has("intermediate_size"):
        channels = keys.number("intermediate_size")
    else:
        channels = keys.number("expand") * keys.number("hidden_size")
    names, mixer = ("state_size", "conv_kernel"), types.mixer(keys, "use_bias")
    mamba = _mamba1_layer(keys, types, channels, names, mixer)
    return layers_by_kind(keys, ["recurrent"] * keys.number("num_hidden_layers"), None, mamba)


def _mamba2(keys: ConfigKeys, types: Types) -> Layers:
    """Mamba2 in every layer."""
    heads, head_dim = keys.number("num_heads"), keys.number("head_dim")
    channels = keys.number("expand") * keys.number("hidden_size")
    if heads * head_dim != channels:
        raise keys.wrong("num_heads", heads, f"a number that makes {channels} with {head_dim} each")
    names, mixer = ("state_size", "n_groups", "conv_kernel"), types.mixer(keys, "use_bias")
    mamba = _mamba2_layer(keys, types, (heads, head_dim), names, mixer)
    return layers_by_kind(keys, ["recurrent"] * keys.number("num_hidden_layers"), None, mamba)


def _jamba(keys: ConfigKeys, types: Types) -> Layers:
    """Jamba: Mamba1, and attention in one layer of a period."""
    period, offset = keys.number("attn_layer_period"), keys.number("attn_layer_offset", least=0)
    if offset >= period:
        raise keys.wrong("attn_layer_offset", offset, f"less than attn_layer_period, {period}")
    count = keys.number("num_hidden_layers")
    kinds = ["attention" if i % period == offset else "recurrent" for i in range(count)]
    names, mixer = ("mamba_d_state", "mamba_d_conv"), types.mixer(keys, "mamba_proj_bias")
    mamba = _mamba1_layer(keys, types, _channels(keys), names, mixer)
    attention = types.attention(keys.kv_heads(), keys.head_dim())
    return layers_by_kind(keys, keys.listed_kinds(count) or kinds, attention, mamba)


def _last_of_each(count: int, group: int) -> list[str]:
    """Return the kinds of ``count`` layers, where the last layer of each group has attention."""
    return ["recurrent" if (i + 1) % group else "attention" for i in range(count)]


def _qwen(keys: ConfigKeys, types: Types) -> Layers:
    """Qwen3-Next and Qwen3.5: gated delta nets, and full attention in every fourth layer."""
    count = keys.number("num_hidden_layers")
    kinds = keys.listed_kinds(count)
    if kinds is None:
        kinds = _last_of_each(count, keys.number("full_attention_interval", 4))
    gdn = _gdn(keys, types, keys.number("linear_key_head_dim"))
    attention = types.attention(keys.kv_heads(), keys.number("head_dim"))
    return layers_by_kind(keys, kinds, attention, gdn)


def _gdn(keys: ConfigKeys, types: Types, key_dim: int, all_heads: int | None = None) -> GdnSpec:
    """Return a gated delta net, by default of ``all_heads`` heads, with values twice as wide."""
    return GdnSpec(
        0,
        key_heads=keys.number("linear_num_key_heads", derived=all_heads),
        value_heads=keys.number("linear_num_value_heads", derived=all_heads),
        key_dim=key_dim,
        value_dim=keys.number("linear_value_head_dim", derived=2 * key_dim),
        conv_kernel=keys.number("linear_conv_kernel_dim", least=2),
        conv_dtype=types.conv,
        state_dtype=types.state(keys, "mamba_ssm_dtype"),
    )


def _olmo_hybrid(keys: ConfigKeys, types: Types) -> Layers:
    """OLMo Hybrid: gated delta nets, and full attention in every fourth layer."""
    hidden, heads = keys.number("hidden_size"), keys.number("num_attention_heads")
    key_heads = keys.number("linear_num_key_heads", derived=heads)
    key_dim = keys.number("linear_key_head_dim", derived=3 * hidden // (4 * key_heads))
    attention = types.attention(keys.kv_heads(), hidden // heads)
    gdn = _gdn(keys, types, key_dim, heads)
    return layers_by_kind(keys, keys.layer_kinds(), attention, gdn)


def _kimi_linear(keys: ConfigKeys, types: Types) -> Layers:
    """Kimi-Linear: KDA, and latent attention in some layers.

    Checkpoints list the layers in ``linear_attn_config``, counted from 1; transformers' own class
    has keys beside the others.
    """
    linear = keys.part("linear_attn_config")
    count = keys.number("num_hidden_layers")
    kinds = keys.listed_kinds(count)
    if linear.has("kda_layers"):
        numbers = range(1, count + 1)
        listed, full = (linear.indices(k, numbers) for k in ("kda_layers", "full_attn_layers"))
        if linear.has("full_attn_layers") and sorted([*listed, *full]) != list(numbers):
            wanted = f"all of {count} layers once with those of full_attn_layers"
            raise linear.wrong("kda_layers", listed, wanted)
        kinds = kinds or ["recurrent" if i in listed else "attention" for i in numbers]

    def number(inside: str, beside: str, least: int = 1) -> int:
        if linear.has(inside):
            return linear.number(inside, least=least)
        return keys.number(beside, least=least)

    kda = KdaSpec(
        0,
        heads=number("num_heads", "linear_num_heads"),
        dim=number("head_dim", "linear_head_dim"),
        conv_kernel=number("short_conv_kernel_size", "linear_conv_kernel_dim", 2),
        conv_dtype=types.conv,
        state_dtype=types.state(keys, unless_named=DType.FLOAT32),
    )
    return layers_by_kind(keys, kinds or keys.layer_kinds(count), latent(keys, types), kda)


def _bailing(keys: ConfigKeys, types: Types) -> Layers:
    """Ling 2.5 (linear attention) and Ling 3 (KDA); the last layer of a group has latent attention.

    Both have the same ``model_type``, so the architecture tells them apart. A config without
    architectures that has a short convolution is Ling 3; a config without either is refused. The
    numbers are the defaults of vLLM's class of Ling 3.
    """
    named = keys.config.get("architectures") or ()
    known = [
        architecture
        for architecture in _BAILING
        if isinstance(named, list | tuple) and architecture in named
    ]
    if not named and keys.has("short_conv_kernel_size"):
        known = [LING_3]
    if len(known) != 1:
        raise keys.wrong("architectures", named or None, " or ".join(_BAILING))
    v3 = known == [LING_3]
    count = keys.number("num_hidden_layers", 20 if v3 else None)
    group = keys.number("layer_group_size", 5 if v3 else None)
    kinds = _last_of_each(count, group)
    if v3:  # the layers left over behind the last group have attention
        kinds[count // group * group :] = ["attention"] * (count % group)
    if (keys.listed_kinds(count) or kinds) != kinds:
        raise keys.fault("layer_types", f" are not those of layer_group_size {group}")
    heads = keys.number("num_attention_heads", 16 if v3 else None)
    dim = keys.number("head_dim", 128) if v3 else keys.head_dim()
    linear: LinearAttentionSpec | KdaSpec = LinearAttentionSpec(0, heads, dim, types.state(keys))
    if v3:
        kernel = keys.number("short_conv_kernel_size", 4, least=2)
        linear = KdaSpec(0, heads, dim, kernel, types.conv, types.ssm or DType.FLOAT32)
    return layers_by_kind(keys, kinds, latent(keys, types), linear)


def _minimax(keys: ConfigKeys, types: Types) -> Layers:
    """MiniMax-Text-01 and M1: linear attention, and full attention in the listed layers.

    Checkpoints list numbers (``attn_type_list``); transformers' own class has names.
    """
    count = keys.number("num_hidden_layers")
    if keys.has("attn_type_list") or keys.model_type != "minimax":
        numbers = keys.sequence("attn_type_list", count, (0, 1))
        kinds = [("recurrent", "attention")[number] for number in numbers]
    else:
        kinds = keys.layer_kinds(count)
    heads, dim = keys.number("num_attention_heads"), keys.head_dim()
    linear = LinearAttentionSpec(0, heads, dim, types.state(keys))
    return layers_by_kind(keys, kinds, types.attention(keys.kv_heads(), dim), linear)


def _lfm2(keys: ConfigKeys, types: Types) -> Layers:
    """LFM2: short convolutions over the hidden size, and attention among them."""
    count = keys.number("num_hidden_layers")
    kinds = keys.listed_kinds(count)
    if kinds is None and keys.has("full_attn_idxs"):
        full = keys.indices("full_attn_idxs", range(count))
        kinds = ["attention" if i in full else "recurrent" for i in range(count)]
    elif kinds is None:
        kinds = keys.layer_kinds(count)
    hidden = keys.number("hidden_size")
    conv = ShortConvSpec(
        0,
        channels=hidden if keys.model_type == "lfm2_moe" else keys.number("conv_dim", hidden),
        conv_kernel=keys.number("conv_L_cache", least=2),
        conv_dtype=types.conv,
    )
    head_dim = keys.share("num_attention_heads", hidden, "hidden_size")
    return layers_by_kind(keys, kinds, types.attention(keys.kv_heads(), head_dim), conv)


MODELS: ModelTable = {
    "bailing_hybrid": _bailing,
    "bamba": _bamba,
    "falcon_h1": _falcon_h1,
    "falcon_mamba": _mamba,
    "granitemoehybrid": _granite,
    "jamba": _jamba,
    "kimi_linear": _kimi_linear,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2,
    "mamba": _mamba,
    "mamba2": _mamba2,
    "minimax": _minimax,
    "minimax_m1": _minimax,
    "minimax_text_01": _minimax,
    "nemotron_h": _nemotron_h,
    "olmo_hybrid": _olmo_hybrid,
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), _qwen),
    "zamba2": _zamba2,
}
