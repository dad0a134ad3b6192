"""Models with Mamba layers: alone, or with attention among them."""

from __future__ import annotations

from dataclasses import replace

from restow.broker.families.hf.keys import Keys
from restow.broker.families.hf.layers import Layers, ModelTable, WholeTable, layers_by_kind
from restow.broker.families.hf.nested import Whole
from restow.broker.families.hf.types import Types
from restow.broker.families.recurrent import Mamba1Spec, Mamba2Spec
from restow.broker.layout import DType


def _nemotron_h(keys: Keys, types: Types) -> Layers:
    """Each layer is one of Mamba2, attention, MLP, experts: a pattern of letters, or a list."""
    key = next(
        (k for k in ("layers_block_type", "layer_types", "hybrid_override_pattern") if keys.has(k)),
        None,
    )
    if key is not None:
        kinds = keys.kinds(key)
        if keys.has("num_hidden_layers"):
            kinds = keys.as_many(key, kinds, keys.number("num_hidden_layers"))
    elif keys.number("num_hidden_layers", 4) == 4:
        kinds = ["recurrent", "none", "attention", "none"]  # the configuration class's default
    else:
        raise keys.fault("hybrid_override_pattern", " is missing, and so is layers_block_type")
    attention = types.attention(
        keys.kv_heads(8), keys.number(("head_dim", "attention_head_dim"), 128)
    )
    mamba = Mamba2Spec(
        0,
        heads=keys.number("mamba_num_heads", 128),
        head_dim=keys.number("mamba_head_dim", 64),
        state=keys.number("ssm_state_size", 128),
        groups=keys.number(("mamba_n_groups", "n_groups"), 8),
        conv_kernel=keys.number(("mamba_d_conv", "conv_kernel"), 4, least=2),
        conv_dtype=types.conv,
        ssm_dtype=types.state(keys, "mamba_ssm_cache_dtype", DType.FLOAT32),
        mixer=types.mixer(keys, 4096, "use_bias"),
    )
    return layers_by_kind(keys, kinds, attention, mamba)


def _granite(keys: Keys, types: Types) -> Layers:
    """Granite 4: Mamba2 layers with attention layers among them."""
    kinds = keys.listed_kinds() or ["recurrent"] * keys.number("num_hidden_layers", 32)
    return _mamba_names(keys, types, kinds, keys.kv_heads(None), _channels(keys))


def _bamba(keys: Keys, types: Types) -> Layers:
    """Bamba: as Granite, with the attention layers listed by number."""
    count = keys.number("num_hidden_layers", 32)
    listed = keys.indices("attn_layer_indices", range(count))
    kinds = keys.listed_kinds() or [
        "attention" if i in listed else "recurrent" for i in range(count)
    ]
    return _mamba_names(keys, types, kinds, keys.kv_heads(8), _channels(keys))


def _falcon_h1(keys: Keys, types: Types) -> Layers:
    """Falcon-H1: attention and Mamba2 side by side in every layer."""
    kinds = ["both"] * keys.number("num_hidden_layers", 32)
    unsized = "mamba_d_ssm" in keys.config and not keys.has("mamba_d_ssm")
    channels = _channels(keys) if unsized else keys.number("mamba_d_ssm", 1024)
    # Rounded differently from a plain product.
    why = "the in-projection is scaled by multipliers (ssm_multipliers)"
    return _mamba_names(keys, types, kinds, keys.kv_heads(8), channels, why)


def _channels(keys: Keys) -> int:
    return keys.number("mamba_expand", 2) * keys.number("hidden_size", 4096)


def _mamba_names(
    keys: Keys,
    types: Types,
    kinds: list[str],
    kv_heads: int,
    channels: int,
    obstacle: str = "",
) -> Layers:
    """The names that Bamba, Granite and Falcon-H1 share."""
    mixer = types.mixer(keys, 4096, "mamba_proj_bias")
    if obstacle:
        mixer = replace(mixer, obstacle=obstacle)
    heads = keys.number("mamba_n_heads", 128)
    mamba = Mamba2Spec(
        0,
        heads,
        head_dim=keys.mamba_head_dim(channels, heads),
        state=keys.number("mamba_d_state", 256),
        groups=keys.number("mamba_n_groups", 1),
        conv_kernel=keys.number("mamba_d_conv", 4, least=2),
        conv_dtype=types.conv,
        ssm_dtype=types.state(keys),
        mixer=mixer,
    )
    return layers_by_kind(keys, kinds, types.attention(kv_heads, keys.head_dim()), mamba)


def _zamba2(keys: Keys, types: Types) -> Layers:
    """Zamba2: Mamba2 everywhere, and in hybrid layers attention over twice the hidden size."""
    kinds = keys.listed_kinds(54)
    if kinds is None and keys.number("num_hidden_layers", 54) == 54:
        hybrid = (*range(6, 43, 6), 47, 51)  # the configuration class's default
        kinds = ["both" if i in hybrid else "recurrent" for i in range(54)]
    if kinds is None:
        raise keys.wrong("layers_block_type", None, "a list of layer types")
    hidden, heads = keys.number("hidden_size", 2560), keys.number("num_attention_heads", 32)
    if keys.has("attention_head_dim"):
        head_dim = keys.number("attention_head_dim")
    else:
        head_dim = keys.share("num_attention_heads", 32, 2 * hidden, "twice the hidden_size")
    attention = types.attention(keys.kv_heads(heads), head_dim)
    channels = keys.number("mamba_expand", 2) * hidden
    mamba = Mamba2Spec(
        0,
        heads=keys.number("n_mamba_heads", 8),
        head_dim=keys.share("n_mamba_heads", 8, channels, "mamba_expand times hidden_size"),
        state=keys.number("mamba_d_state", 64),
        groups=keys.number("mamba_ngroups", 1),
        conv_kernel=keys.number("mamba_d_conv", 4, least=2),
        conv_dtype=types.conv,
        ssm_dtype=types.state(keys),
        mixer=types.mixer(keys, 2560, "add_bias_linear"),
    )
    return layers_by_kind(keys, kinds, attention, mamba)


def _mamba(keys: Keys, types: Types) -> Layers:
    """Mamba and Falcon-Mamba: Mamba1 in every layer."""
    hidden = keys.number("hidden_size", 768)
    mamba = Mamba1Spec(
        0,
        channels=keys.number("intermediate_size")
        if keys.has("intermediate_size")
        else keys.number("expand", 2) * hidden,
        state=keys.number("state_size", 16),
        conv_kernel=keys.number("conv_kernel", 4, least=2),
        conv_dtype=types.conv,
        ssm_dtype=types.state(keys),
        mixer=types.mixer(keys, 768, "use_bias"),
    )
    return layers_by_kind(keys, ["recurrent"] * keys.number("num_hidden_layers", 32), None, mamba)


def _mamba2(keys: Keys, types: Types) -> Layers:
    """Mamba2 in every layer."""
    heads, head_dim = keys.number("num_heads", 128), keys.number("head_dim", 64)
    channels = keys.number("expand", 2) * keys.number("hidden_size", 4096)
    if heads * head_dim != channels:
        raise keys.wrong("num_heads", heads, f"so many that {head_dim} each make {channels}")
    mamba = Mamba2Spec(
        0,
        heads=heads,
        head_dim=head_dim,
        state=keys.number("state_size", 128),
        groups=keys.number("n_groups", 8),
        conv_kernel=keys.number("conv_kernel", 4, least=2),
        conv_dtype=types.conv,
        ssm_dtype=types.state(keys),
        mixer=types.mixer(keys, 4096, "use_bias"),
    )
    return layers_by_kind(keys, ["recurrent"] * keys.number("num_hidden_layers", 64), None, mamba)


def _jamba(keys: Keys, types: Types) -> Layers:
    """Jamba: Mamba1, and attention in one layer of a period."""
    period = keys.number("attn_layer_period", 8)
    offset = keys.number("attn_layer_offset", 4, least=0)
    if offset >= period:
        raise keys.wrong("attn_layer_offset", offset, f"less than attn_layer_period, {period}")
    count = keys.number("num_hidden_layers", 32)
    kinds = ["attention" if i % period == offset else "recurrent" for i in range(count)]
    mamba = Mamba1Spec(
        0,
        channels=_channels(keys),
        state=keys.number("mamba_d_state", 16),
        conv_kernel=keys.number("mamba_d_conv", 4, least=2),
        conv_dtype=types.conv,
        ssm_dtype=types.state(keys),
        mixer=types.mixer(keys, 4096, "mamba_proj_bias"),
    )
    attention = types.attention(keys.kv_heads(8), keys.head_dim())
    return layers_by_kind(keys, keys.listed_kinds() or kinds, attention, mamba)


MODELS: ModelTable = {
    "bamba": _bamba,
    "falcon_h1": _falcon_h1,
    "falcon_mamba": _mamba,
    "granitemoehybrid": _granite,
    "jamba": _jamba,
    "mamba": _mamba,
    "mamba2": _mamba2,
    "nemotron_h": _nemotron_h,
    "zamba2": _zamba2,
}

WHOLES: WholeTable = {"NemotronH_Nano_VL_V2": Whole("nemotron_h")}
