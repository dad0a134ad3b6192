"""Models with delta nets, KDA or short convolutions among their attention layers."""

from __future__ import annotations

from restow.broker.families.hf.keys import Keys
from restow.broker.families.hf.latent_models import latent
from restow.broker.families.hf.layers import Layers, ModelTable, layers_by_kind
from restow.broker.families.hf.types import Types
from restow.broker.families.recurrent import GdnSpec, KdaSpec, ShortConvSpec
from restow.broker.layout import DType


def _qwen3_next(keys: Keys, types: Types) -> Layers:
    """Qwen3-Next: gated delta nets, and full attention in every fourth layer."""
    kinds = keys.listed_kinds(48)
    if kinds is None:
        count = keys.number("num_hidden_layers", 48)
        interval = keys.number("full_attention_interval", 4)
        kinds = ["recurrent" if (i + 1) % interval else "attention" for i in range(count)]
    gdn = GdnSpec(
        0,
        key_heads=keys.number("linear_num_key_heads", 16),
        value_heads=keys.number("linear_num_value_heads", 32),
        key_dim=keys.number("linear_key_head_dim", 128),
        value_dim=keys.number("linear_value_head_dim", 128),
        conv_kernel=keys.number("linear_conv_kernel_dim", 4, least=2),
        conv_dtype=types.conv,
        state_dtype=types.state(keys),
    )
    attention = types.attention(keys.kv_heads(2), keys.number("head_dim", 256))
    return layers_by_kind(kinds, attention, gdn)


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
    return layers_by_kind(keys.listed_kinds(27) or kinds, latent(keys, types), kda)


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
    return layers_by_kind(keys.listed_kinds() or kinds, attention, conv)


MODELS: ModelTable = {
    "kimi_linear": _kimi_linear,
    "lfm2": _lfm2,
    "qwen3_next": _qwen3_next,
}
