"""Models with latent attention (MLA), or whose keys and values are made of latents."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from restow.broker.errors import LayoutFormError
from restow.broker.families.hf.keys import Keys, wrong
from restow.broker.families.hf.layers import Layers, ModelTable, layers_by_kind
from restow.broker.families.hf.types import Types
from restow.broker.families.specs import MlaSpec

Reader = Callable[[Keys, Types], Layers]


def _deepseek(keys: Keys, types: Types) -> Layers:
    """DeepSeek-V2 and V3, Kimi-K2: latent attention in every layer.

    Of draft layers (``num_nextn_predict_layers``), which lie behind the others, the model itself
    keeps nothing: an engine that runs them has state of them.
    """
    if keys.has("index_topk"):
        raise LayoutFormError(
            f"config: index_topk: {keys.config['index_topk']!r:.60}: this model type has no "
            f"indexer; deepseek_v32, glm_moe_dsa and hy_v4 have one",
            key="index_topk",
        )
    return _every_layer(keys, latent(keys, types))


def _mistral4(keys: Keys, types: Types) -> Layers:
    """Mistral Small 4, as vLLM serves it: in Mistral's own format, so as a DeepSeek-V3."""
    return _every_layer(keys, latent(keys, types, 256))


def _named(keys: Keys, types: Types) -> Layers:
    """openPangu Ultra and Sarvam: latent attention, by configuration classes of their own."""
    for key in ("kv_lora_rank", "qk_rope_head_dim"):
        if key not in keys.config:
            raise wrong(key, None, "an integer from 1 on")
    return _deepseek(keys, types)


def _longcat_flash(keys: Keys, types: Types) -> Layers:
    """LongCat-Flash: two latent attentions in each layer, which are numbered on."""
    attentions = keys.number("num_hidden_layers", 2 * keys.number("num_layers", 1))
    count = keys.number("num_layers", attentions // 2)
    if attentions != 2 * count:
        raise LayoutFormError(
            f"config: num_hidden_layers: {attentions} is not twice num_layers, {count}",
            key="num_hidden_layers",
        )
    flat = layers_by_kind(["attention"] * attentions, latent(keys, types), None)
    return [flat[2 * i] + flat[2 * i + 1] for i in range(count)]


def _minicpm3(keys: Keys, types: Types) -> Layers:
    """MiniCPM3: of latents each head's keys and values are made and kept, as wide as its query."""
    key_dim = keys.number("qk_nope_head_dim", 64) + keys.number("qk_rope_head_dim", 32)
    heads = types.attention(keys.number("num_attention_heads", 40), key_dim)
    return layers_by_kind(["attention"] * keys.number("num_hidden_layers"), heads, None)


def _step3(keys: Keys, types: Types) -> Layers:
    """Step3: queries are made of latents; keys and values have one head, which all ranks hold."""
    if keys.number("num_attention_groups", 1) != 1:
        raise wrong("num_attention_groups", keys.config["num_attention_groups"], "1")
    one = types.attention(1, keys.number("head_dim", 256))
    return layers_by_kind(["attention"] * keys.number("num_hidden_layers"), one, None)


def _part(read: Reader, model_types: tuple[str, ...], *names: str) -> Reader:
    """Return what reads a config with the language model in a part, which has one of the names."""

    def read_part(keys: Keys, types: Types) -> Layers:
        name = next((one for one in names if keys.has(one)), names[0])
        inner = keys.config.get(name)
        if not isinstance(inner, Mapping):
            raise wrong(name, inner, "the config of the language model")
        found = inner.get("model_type") or model_types[0]
        if found not in model_types:
            raise wrong(f"{name}.model_type", found, f"one of {', '.join(model_types)}")
        return read(Keys(inner), types)

    return read_part


def latent(keys: Keys, types: Types, default_rank: int = 512) -> MlaSpec:
    """Return a layer with one latent vector a token."""
    return MlaSpec(0, sum(latent_dims(keys, default_rank)), types.kv, types.scales)


def latent_dims(keys: Keys, default_rank: int = 512) -> tuple[int, int]:
    """Return the sizes of the compressed keys and values, and of the rotary part behind them."""
    for key in ("kv_lora_rank", "qk_rope_head_dim"):
        if keys.config.get(key, 0) is None:
            raise LayoutFormError(
                f"config: {key}: null: such a model has no latents (MLA) but keys and values of "
                f"every head, and no family describes these",
                key=key,
            )
    return keys.number("kv_lora_rank", default_rank), keys.number("qk_rope_head_dim", 64)


def _every_layer(keys: Keys, spec: MlaSpec) -> Layers:
    return layers_by_kind(["attention"] * keys.number("num_hidden_layers"), spec, None)


MODELS: ModelTable = {
    "axk1": _deepseek,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "deepseek_vl_v2": _part(
        _deepseek, ("deepseek_v2", "deepseek_vl_v2"), "language_config", "text_config"
    ),
    "glm4_moe_lite": _deepseek,
    "kimi_k2": _deepseek,
    "kimi_k25": _part(_deepseek, ("deepseek_v3", "kimi_k2"), "text_config"),
    "kimi_vl": _part(_deepseek, ("deepseek_v3", "deepseek_v2"), "text_config"),
    "longcat_flash": _longcat_flash,
    "minicpm3": _minicpm3,
    "mistral4": _mistral4,
    "pangu_ultra_moe": _named,
    "sarvam_mla": _named,
    "step3_text": _step3,
    "step3_vl": _part(_step3, ("step3_text",), "text_config"),
}
