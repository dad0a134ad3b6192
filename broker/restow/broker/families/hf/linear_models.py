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
    return layers_by_kind(keys.listed_kinds(48) or kinds, attention, gdn)


def _kimi_linear(keys: Keys, types: Types) -> Layers:
    """Kimi-Linear: KDA, and latent attention in every fifth layer unless the layers are listed.

    Checkpoints say it in ``linear_attn_config``, with layers counted from 1; transformers' own
    class in keys beside the others.
    """
    linear = Keys(keys.config.get("linear_attn_config") or {})
    count = keys.number("num_hidden_layers", 27)
    kinds = ["attention" if i and i % 4 == 0 else "recurrent" for i in range(count)]
    if linear.has("kda_layers"):
        listed = linear.indices("kda_layers")
        kinds = ["recurrent" if i + 1 in listed else "attention" for i in range(count)]
    kda = KdaSpec(
        0,
        heads=linear.number("num_heads", keys.number("linear_num_heads", 32)),
        dim=linear.number("head_dim", keys.number("linear_head_dim", 128)),
        conv_kernel=linear.number(
            "short_conv_kernel_size", keys.number("linear_conv_kernel_dim", 4), least=2
        ),
        conv_dtype=types.conv,
        state_dtype=types.state(keys, unless_named=DType.FLOAT32),
    )
    return layers_by_kind(keys.listed_kinds(27) or kinds, latent(keys, types), kda)


def _lfm2(keys: Keys, types: Types) -> Layers:
    """LFM2: short convolutions over the hidden size, and attention among them."""
    count = keys.number("num_hidden_layers", 32)
    full = keys.indices("full_attn_idxs") if keys.has("full_attn_idxs") else range(count)
    kinds = ["attention" if i in full else "recurrent" for i in range(count)]
    heads, hidden = keys.number("num_attention_heads", 32), keys.number("hidden_size", 2560)
    conv = ShortConvSpec(
        0,
        channels=keys.number("conv_dim", hidden),
        conv_kernel=keys.number("conv_L_cache", 3, least=2),
        conv_dtype=types.conv,
    )
    attention = types.attention(keys.kv_heads(8), keys.number("head_dim", hidden // heads))
    return layers_by_kind(keys.listed_kinds() or kinds, attention, conv)


MODELS: ModelTable = {
    "kimi_linear": _kimi_linear,
    "lfm2": _lfm2,
    "qwen3_next": _qwen3_next,
}
