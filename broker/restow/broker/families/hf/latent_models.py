"""Models with latent attention (MLA) in every layer."""

from __future__ import annotations

from restow.broker.families.hf.keys import Keys
from restow.broker.families.hf.layers import Layers, ModelTable, layers_by_kind
from restow.broker.families.hf.types import Types
from restow.broker.families.specs import MlaSpec


def _deepseek(keys: Keys, types: Types) -> Layers:
    """DeepSeek-V2 and V3: latent attention in every layer."""
    count = keys.number("num_hidden_layers")
    return layers_by_kind(["attention"] * count, latent(keys, types), None)


def latent(keys: Keys, types: Types) -> MlaSpec:
    """Return a layer with one latent vector a token."""
    rank, rope = keys.number("kv_lora_rank", 512), keys.number("qk_rope_head_dim", 64)
    return types.latent(rank + rope)


MODELS: ModelTable = {
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
}
