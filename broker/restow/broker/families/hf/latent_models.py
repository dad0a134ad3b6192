"""Models with latent attention (MLA), or whose keys and values are made of latents."""

from __future__ import annotations

from restow.broker.families.hf.attention.reader import Gqa
from restow.broker.families.hf.keys import Keys
from restow.broker.families.hf.layers import Layers, ModelTable, WholeTable, layers_by_kind
from restow.broker.families.hf.nested import Whole
from restow.broker.families.hf.types import Types
from restow.broker.families.specs import MlaSpec


def _deepseek(keys: Keys, types: Types) -> Layers:
    """DeepSeek-V2 and V3, Kimi-K2: latent attention in every layer.

    Of draft layers (``num_nextn_predict_layers``), which lie behind the others, the model itself
    keeps nothing: an engine that runs them has state of them. Small models of the family have keys
    and values of heads in place of latents (DeepSeek-OCR, DeepSeek-VL2-Tiny).
    """
    if keys.has("index_topk"):
        said = f": {keys.config['index_topk']!r:.60}: this model type has no indexer"
        raise keys.fault("index_topk", f"{said}; deepseek_v32, glm_moe_dsa and hy_v4 have one")
    if _without_latents(keys):
        return _HEADS(keys, types)
    return _every_layer(keys, latent(keys, types))


def _without_latents(keys: Keys) -> bool:
    """Return whether vLLM runs the attention of the first DeepSeek (`DeepseekV2DecoderLayer`)."""
    sizes = [keys.config.get(key) for key in ("qk_nope_head_dim", "qk_rope_head_dim")]
    return not keys.has("kv_lora_rank") and "kv_lora_rank" in keys.config and sizes == [0, 0]


def _mistral4(keys: Keys, types: Types) -> Layers:
    """Mistral Small 4, as vLLM serves it: in Mistral's own format, so as a DeepSeek-V3."""
    return _every_layer(keys, latent(keys, types, 256))


def _named(keys: Keys, types: Types) -> Layers:
    """openPangu Ultra and Sarvam: latent attention, by configuration classes of their own."""
    for key in ("kv_lora_rank", "qk_rope_head_dim"):
        if key not in keys.config:
            raise keys.wrong(key, None, "an integer from 1 on")
    return _deepseek(keys, types)


def _longcat_flash(keys: Keys, types: Types) -> Layers:
    """LongCat-Flash: two latent attentions in each layer, which are numbered on."""
    attentions = keys.number("num_hidden_layers", 2 * keys.number("num_layers", 1))
    count = keys.number("num_layers", attentions // 2)
    if attentions != 2 * count:
        raise keys.wrong("num_hidden_layers", attentions, f"twice num_layers, {count}")
    flat = layers_by_kind(keys, ["attention"] * attentions, latent(keys, types), None)
    return [flat[2 * i] + flat[2 * i + 1] for i in range(count)]


def _minicpm3(keys: Keys, types: Types) -> Layers:
    """MiniCPM3: of latents each head's keys and values are made and kept, as wide as its query."""
    key_dim = keys.number("qk_nope_head_dim", 64) + keys.number("qk_rope_head_dim", 32)
    heads = types.attention(keys.number("num_attention_heads", 40), key_dim)
    return layers_by_kind(keys, ["attention"] * keys.number("num_hidden_layers"), heads, None)


def latent(keys: Keys, types: Types, default_rank: int = 512) -> MlaSpec:
    """Return a layer with one latent vector a token."""
    return types.latent(sum(latent_dims(keys, default_rank)))


def latent_dims(keys: Keys, default_rank: int = 512) -> tuple[int, int]:
    """Return the sizes of the compressed keys and values, and of the rotary part behind them."""
    for key in ("kv_lora_rank", "qk_rope_head_dim"):
        if keys.config.get(key, 0) is None:
            said = ": null: such a model has no latents (MLA), and its heads are not described"
            raise keys.fault(key, f"{said}, unless qk_nope_head_dim and qk_rope_head_dim are 0")
    return keys.number("kv_lora_rank", default_rank), keys.number("qk_rope_head_dim", 64)


_HEADS = Gqa(by_layer=False, sized=False)
"""A head is its share of the hidden size."""


def _every_layer(keys: Keys, spec: MlaSpec) -> Layers:
    return layers_by_kind(keys, ["attention"] * keys.number("num_hidden_layers"), spec, None)


MODELS: ModelTable = {
    "axk1": _deepseek,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "glm4_moe_lite": _deepseek,
    "kimi_k2": _deepseek,
    "longcat_flash": _longcat_flash,
    "minicpm3": _minicpm3,
    "mistral4": _mistral4,
    "pangu_ultra_moe": _named,
    "sarvam_mla": _named,
}

WHOLES: WholeTable = {
    "deepseek_vl_v2": Whole("deepseek_v2", ("deepseek_vl_v2",), alone=True),
    "kimi_k25": Whole("deepseek_v3", ("kimi_k2",), alone=True),
    "kimi_vl": Whole("deepseek_v2", ("deepseek_v3",), alone=True),
    "step3_vl": Whole("step3_text", alone=True),
}
