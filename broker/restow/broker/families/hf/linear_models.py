"""Models with delta nets, KDA, linear attention or short convolutions among attention layers."""

from __future__ import annotations

from restow.broker.families.hf.keys import Keys
from restow.broker.families.hf.latent_models import latent
from restow.broker.families.hf.layers import Layers, ModelTable, WholeTable, layers_by_kind
from restow.broker.families.hf.nested import Whole
from restow.broker.families.hf.types import Types
from restow.broker.families.recurrent import (
    GdnSpec,
    KdaSpec,
    LinearAttentionSpec,
    ShortConvSpec,
)
from restow.broker.layout import DType

_INTERVAL = "full_attention_interval"
_LING_3 = "BailingMoeV3ForCausalLM"
_BAILING = ("BailingMoeV2_5ForCausalLM", _LING_3)


def _qwen3_next(keys: Keys, types: Types) -> Layers:
    """Qwen3-Next: gated delta nets, and full attention in every fourth layer."""
    return _qwen(keys, types, layers=48, kv_heads=2)


def _qwen3_5(keys: Keys, types: Types) -> Layers:
    """Qwen3.5: as Qwen3-Next, with a type of its own for the states."""
    return _qwen(keys, types, layers=32, kv_heads=4)


def _qwen3_5_moe(keys: Keys, types: Types) -> Layers:
    """Qwen3.5 with experts: as Qwen3.5."""
    return _qwen(keys, types, layers=40, kv_heads=2)


def _qwen(keys: Keys, types: Types, layers: int, kv_heads: int) -> Layers:
    """Return what the Qwen of this generation keep, whose defaults differ."""
    gdn = GdnSpec(
        0,
        key_heads=keys.number("linear_num_key_heads", 16),
        value_heads=keys.number("linear_num_value_heads", 32),
        key_dim=keys.number("linear_key_head_dim", 128),
        value_dim=keys.number("linear_value_head_dim", 128),
        conv_kernel=keys.number("linear_conv_kernel_dim", 4, least=2),
        conv_dtype=types.conv,
        state_dtype=types.state(keys, "mamba_ssm_dtype"),
    )
    attention = types.attention(keys.kv_heads(kv_heads), keys.number("head_dim", 256))
    count, interval = keys.number("num_hidden_layers", layers), keys.number(_INTERVAL, 4)
    kinds = keys.listed_kinds(layers) or _last_of_each(count, interval)
    return layers_by_kind(keys, kinds, attention, gdn)


def _last_of_each(count: int, group: int) -> list[str]:
    """Return the kinds of ``count`` layers, of which the last one of each group attends."""
    return ["recurrent" if (i + 1) % group else "attention" for i in range(count)]


def _olmo_hybrid(keys: Keys, types: Types) -> Layers:
    """OLMo Hybrid: gated delta nets, and full attention in every fourth layer."""
    hidden, heads = keys.number("hidden_size", 3840), keys.number("num_attention_heads", 30)
    key_heads = keys.number("linear_num_key_heads", heads)
    key_dim = keys.number("linear_key_head_dim", 3 * hidden // (4 * key_heads))
    gdn = GdnSpec(
        0,
        key_heads=key_heads,
        value_heads=keys.number("linear_num_value_heads", heads),
        key_dim=key_dim,
        value_dim=keys.number("linear_value_head_dim", 2 * key_dim),
        conv_kernel=keys.number("linear_conv_kernel_dim", 4, least=2),
        conv_dtype=types.conv,
        state_dtype=types.state(keys),
    )
    kinds = keys.listed_kinds()
    if kinds is None:
        kinds = _last_of_each(keys.number("num_hidden_layers", 32), 4)
        if "attention" not in kinds:
            kinds[-1] = "attention"
    attention = types.attention(keys.number("num_key_value_heads", heads), hidden // heads)
    return layers_by_kind(keys, kinds, attention, gdn)


def _kimi_linear(keys: Keys, types: Types) -> Layers:
    """Kimi-Linear: KDA, and latent attention in every fifth layer unless the layers are listed.

    Checkpoints say it in ``linear_attn_config``, with layers counted from 1; transformers' own
    class in keys beside the others.
    """
    linear = keys.part("linear_attn_config")
    count = keys.number("num_hidden_layers", 27)
    kinds = ["attention" if i and i % 4 == 0 else "recurrent" for i in range(count)]
    if linear.has("kda_layers"):
        numbers = range(1, count + 1)
        listed, full = (linear.indices(k, numbers) for k in ("kda_layers", "full_attn_layers"))
        if linear.has("full_attn_layers") and sorted([*listed, *full]) != list(numbers):
            wanted = f"all of {count} layers once with those of full_attn_layers"
            raise linear.wrong("kda_layers", listed, wanted)
        kinds = ["recurrent" if i in listed else "attention" for i in numbers]

    def number(inside: str, beside: str, default: int, least: int = 1) -> int:
        if linear.has(inside):
            return linear.number(inside, least=least)
        return keys.number(beside, default, least)

    kda = KdaSpec(
        0,
        heads=number("num_heads", "linear_num_heads", 32),
        dim=number("head_dim", "linear_head_dim", 128),
        conv_kernel=number("short_conv_kernel_size", "linear_conv_kernel_dim", 4, 2),
        conv_dtype=types.conv,
        state_dtype=types.state(keys, unless_named=DType.FLOAT32),
    )
    return layers_by_kind(keys, keys.listed_kinds(27) or kinds, latent(keys, types), kda)


def _bailing(keys: Keys, types: Types) -> Layers:
    """Ling 2.5 (linear attention) and Ling 3 (KDA), and latent attention in the last of a group.

    Both have one ``model_type``, so the architecture says which. A config without architectures
    that has a short convolution is Ling 3; one without either is refused.
    """
    named = keys.config.get("architectures") or ()
    found = [one for one in _BAILING if isinstance(named, list | tuple) and one in named]
    if not named and keys.has("short_conv_kernel_size"):
        found = [_LING_3]
    if len(found) != 1:
        raise keys.wrong("architectures", named or None, " or ".join(_BAILING))
    v3 = found == [_LING_3]
    count = keys.number("num_hidden_layers", 20 if v3 else None)
    group = keys.number("layer_group_size", 5 if v3 else None)
    kinds = _last_of_each(count, group)
    if v3:  # what is left of a group attends
        kinds[count // group * group :] = ["attention"] * (count % group)
    if (keys.listed_kinds(20) or kinds) != kinds:
        raise keys.fault("layer_types", f" are not those of layer_group_size {group}")
    heads = keys.number("num_attention_heads", 16 if v3 else None)
    dim = keys.number("head_dim", 128) if v3 else keys.head_dim()
    linear: LinearAttentionSpec | KdaSpec = LinearAttentionSpec(0, heads, dim, types.state(keys))
    if v3:
        kernel = keys.number("short_conv_kernel_size", 4, least=2)
        state_dtype = types.ssm or DType.FLOAT32
        linear = KdaSpec(0, heads, dim, kernel, types.conv, state_dtype)
    return layers_by_kind(keys, kinds, latent(keys, types), linear)


def _minimax(keys: Keys, types: Types) -> Layers:
    """MiniMax-Text-01 and M1: linear attention, and full attention where the layers are listed.

    Checkpoints list numbers (``attn_type_list``); transformers' own class has names, and attention
    in every second layer where there are none.
    """
    count, heads = keys.number("num_hidden_layers", 32), keys.number("num_attention_heads", 32)
    kinds = keys.listed_kinds() or [("attention", "recurrent")[i % 2] for i in range(count)]
    if keys.has("attn_type_list"):
        numbers = keys.config["attn_type_list"]
        if (
            not isinstance(numbers, list | tuple)
            or len(numbers) != count
            or any(type(number) is not int or number not in (0, 1) for number in numbers)
        ):
            raise keys.wrong(
                "attn_type_list",
                numbers,
                f"a list of so many zeros and ones as num_hidden_layers, {count}",
            )
        keys.took("attn_type_list")
        kinds = [("recurrent", "attention")[number] for number in numbers]
    elif keys.config.get("model_type") != "minimax":
        raise keys.wrong("attn_type_list", None, "a list")
    dim = keys.head_dim()
    linear = LinearAttentionSpec(0, heads, dim, types.state(keys))
    return layers_by_kind(keys, kinds, types.attention(keys.kv_heads(8), dim), linear)


def _lfm2(keys: Keys, types: Types) -> Layers:
    """LFM2: short convolutions over the hidden size, and attention among them."""
    count = keys.number("num_hidden_layers", 32)
    layers = range(count)
    full = keys.indices("full_attn_idxs", layers) if keys.has("full_attn_idxs") else layers
    kinds = ["attention" if i in full else "recurrent" for i in layers]
    hidden = keys.number("hidden_size", 2560)
    conv = ShortConvSpec(
        0,
        channels=keys.number("conv_dim", hidden),
        conv_kernel=keys.number("conv_L_cache", 3, least=2),
        conv_dtype=types.conv,
    )
    attention = types.attention(keys.kv_heads(8), keys.head_dim(hidden))
    return layers_by_kind(keys, keys.listed_kinds() or kinds, attention, conv)


def _lfm2_moe(keys: Keys, types: Types) -> Layers:
    """LFM2 with experts: as LFM2, its layers always listed."""
    kinds = keys.listed_kinds()
    if kinds is None:
        raise keys.wrong("layer_types", None, "a list of layer types")
    heads, hidden = keys.number("num_attention_heads", 32), keys.number("hidden_size", 2048)
    kernel = keys.number("conv_L_cache", 3, least=2)
    conv = ShortConvSpec(0, channels=hidden, conv_kernel=kernel, conv_dtype=types.conv)
    return layers_by_kind(keys, kinds, types.attention(keys.kv_heads(8), hidden // heads), conv)


MODELS: ModelTable = {
    "bailing_hybrid": _bailing,
    "kimi_linear": _kimi_linear,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2_moe,
    "minimax": _minimax,
    "minimax_m1": _minimax,
    "minimax_text_01": _minimax,
    "olmo_hybrid": _olmo_hybrid,
    "qwen3_5_moe_text": _qwen3_5_moe,
    "qwen3_5_text": _qwen3_5,
    "qwen3_next": _qwen3_next,
}

WHOLES: WholeTable = {
    "bailing_moe_v3_vl": Whole(
        "bailing_hybrid", name="bailing_hybrid", fixed=True, architecture=_LING_3
    ),
    "kimi_k3": Whole("kimi_linear", fixed=True),
    "lfm2_vl": Whole("lfm2"),
    "minicpmv4_6": Whole("qwen3_5_text"),
    "minicpmv4_7": Whole("qwen3_5_text"),
    "qwen3_5": Whole("qwen3_5_text", fixed=True),
    "qwen3_5_moe": Whole("qwen3_5_moe_text", fixed=True),
}
