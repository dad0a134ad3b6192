"""Models with latent attention (MLA), some with an indexer that chooses the tokens to read."""

from __future__ import annotations

from dataclasses import replace

from restow.broker.errors import LayoutFormError
from restow.broker.families.hf.attention import Gqa, Layers, ModelTable, layers_by_kind
from restow.broker.families.hf.keys import ConfigKeys
from restow.broker.families.hf.kv_types import Types
from restow.broker.families.specs import (
    BlockScaledMlaSpec,
    IndexerSpec,
    LatentSpec,
    MlaSpec,
    ScaleKind,
)
from restow.broker.layout import DType

_PAGE_TOKENS = 64
"""Tokens of a page of the indexer's kernels on CUDA (vLLM `DeepseekV32IndexerBackend`)."""
_BLOCK_DIM = 128
"""Elements of an indexer's key that share a scale (vLLM `Indexer.quant_block_size`)."""
_SPARSE = ("sparse_attention", "sparse", "indexed_attention", "deepseek_sparse_attention")
"""Names of layers with an indexer, in configs with layers of both kinds."""


def latent(keys: ConfigKeys, types: Types) -> MlaSpec:
    """Return a layer with one latent vector per token."""
    return types.latent(sum(_latent_dims(keys)))


def _latent_dims(keys: ConfigKeys) -> tuple[int, int]:
    """Return the sizes of the compressed keys and values, and of the rotary part behind them."""
    for key in ("kv_lora_rank", "qk_rope_head_dim"):
        if keys.config.get(key, 0) is None:
            problem = ": null: the model has no latents (MLA), and its heads are not described"
            raise keys.fault(key, f"{problem}, unless qk_nope_head_dim and qk_rope_head_dim are 0")
    return keys.number("kv_lora_rank"), keys.number("qk_rope_head_dim")


def _every_layer(keys: ConfigKeys, spec: MlaSpec) -> Layers:
    return layers_by_kind(keys, ["attention"] * keys.number("num_hidden_layers"), spec)


def _deepseek(keys: ConfigKeys, types: Types) -> Layers:
    """DeepSeek-V2 and V3, Kimi-K2 and others: latent attention in every layer.

    Small models of the family have keys and values of heads in place of latents (DeepSeek-OCR,
    DeepSeek-VL2-Tiny).
    """
    if keys.has("index_topk"):
        problem = f": {keys.config['index_topk']!r:.60}: this model type has no indexer"
        raise keys.fault(
            "index_topk", f"{problem}; deepseek_v32, glm_moe_dsa and hy_v4 have an indexer"
        )
    if _without_latents(keys):
        return Gqa(by_layer=False, sized=False)(keys, types)
    return _every_layer(keys, latent(keys, types))


def _without_latents(keys: ConfigKeys) -> bool:
    """Return whether vLLM runs the attention of the first DeepSeek (`DeepseekV2DecoderLayer`)."""
    sizes = [keys.config.get(key) for key in ("qk_nope_head_dim", "qk_rope_head_dim")]
    return not keys.has("kv_lora_rank") and "kv_lora_rank" in keys.config and sizes == [0, 0]


def _longcat_flash(keys: ConfigKeys, types: Types) -> Layers:
    """LongCat-Flash: two latent attentions in each layer, each with a number of its own."""
    listed = keys.has("num_hidden_layers")
    attentions = keys.number("num_hidden_layers", None if listed else 2 * keys.number("num_layers"))
    count = keys.number("num_layers", attentions // 2)
    if attentions != 2 * count:
        raise keys.wrong("num_hidden_layers", attentions, f"twice num_layers, {count}")
    flat = layers_by_kind(keys, ["attention"] * attentions, latent(keys, types))
    return [flat[2 * i] + flat[2 * i + 1] for i in range(count)]


def _minicpm3(keys: ConfigKeys, types: Types) -> Layers:
    """MiniCPM3: keys and values of heads, as wide as the query, are made of latents and kept."""
    key_dim = keys.number("qk_nope_head_dim") + keys.number("qk_rope_head_dim")
    heads = types.attention(keys.number("num_attention_heads"), key_dim)
    return layers_by_kind(keys, ["attention"] * keys.number("num_hidden_layers"), heads)


def _deepseek_sparse(keys: ConfigKeys, types: Types) -> Layers:
    """DeepSeek-V3.2, GLM-5: every layer is sparse; some read what an earlier layer has chosen."""
    count = keys.number("num_hidden_layers")
    choosing = _by_pattern(keys, count)
    listed = _listed(keys, count)
    if listed is not None and listed != choosing:
        raise keys.fault(
            "indexer_types",
            f": {listed.count(True)} layers are 'full', and by index_topk_freq, "
            f"index_skip_topk_offset and index_topk_pattern, which vLLM reads, "
            f"{choosing.count(True)} have an indexer, or others",
        )
    return _with_indexer(keys, types, choosing)


def _hy_v4(keys: ConfigKeys, types: Types) -> Layers:
    """HY V4: ``layer_types`` says which layers are sparse, ``indexer_types`` which choose."""
    count = keys.number("num_hidden_layers")
    kinds = keys.sequence("layer_types", count) if keys.config.get("layer_types") else []
    sparse = [kind in _SPARSE for kind in kinds] or [False] * count
    listed = _listed(keys, count)
    choosing = [i == 0 or i % 4 == 1 for i in range(count)] if listed is None else listed
    if types.scales.kind is ScaleKind.PER_BLOCK and not all(sparse):
        problem = ": not all layers are sparse, and only those have scales per block"
        raise keys.fault("layer_types", problem)
    return _with_indexer(keys, types, [a and b for a, b in zip(sparse, choosing, strict=True)])


def _with_indexer(keys: ConfigKeys, types: Types, choosing: list[bool]) -> Layers:
    """Return latents for every layer, with an indexer's keys for layers that choose tokens."""
    spec = _sparse_latent(keys, types)
    key_dim = keys.number("index_head_dim")
    if key_dim % _BLOCK_DIM:
        wanted = f"a multiple of {_BLOCK_DIM}, the elements that share a scale"
        raise keys.wrong("index_head_dim", key_dim, wanted)
    indexer = IndexerSpec(0, key_dim, _BLOCK_DIM, _PAGE_TOKENS)
    return [
        (replace(spec, layer=i), replace(indexer, layer=i)) if own else (replace(spec, layer=i),)
        for i, own in enumerate(choosing)
    ]


def _sparse_latent(keys: ConfigKeys, types: Types) -> LatentSpec:
    if types.scales.kind is not ScaleKind.PER_BLOCK:
        return latent(keys, types)
    spec = BlockScaledMlaSpec(0)
    if types.kv is not DType.FLOAT8_E4M3FN:
        raise LayoutFormError(
            f"latents with scales per block are float8_e4m3fn, not {types.kv.label}"
        )
    dims = _latent_dims(keys)
    if dims != (spec.latent_dim, spec.rope_dim):
        raise keys.fault(
            "kv_lora_rank",
            f" and qk_rope_head_dim: {dims[0]} and {dims[1]}: latents with scales per block (vLLM "
            f"fp8_ds_mla) have {spec.latent_dim} and {spec.rope_dim}",
        )
    return spec


def _by_pattern(keys: ConfigKeys, count: int) -> list[bool]:
    """Return which layers have an indexer, as in vLLM (`DeepseekV32Attention`)."""
    pattern = keys.config.get("index_topk_pattern")
    if pattern is None:
        every = keys.number("index_topk_freq", 1)
        offset = keys.number("index_skip_topk_offset", 2, least=0)
        return [max(i - offset + 1, 0) % every == 0 for i in range(count)]
    if not isinstance(pattern, str | list | tuple) or any(
        letter not in ("F", "S") for letter in pattern
    ):
        raise keys.wrong("index_topk_pattern", pattern, "a pattern of F (full) and S (shared)")
    if len(pattern) < count:
        problem = f" names {len(pattern)} layers, num_hidden_layers says {count}"
        raise keys.fault("index_topk_pattern", problem)
    return [letter == "F" for letter in pattern[:count]]


def _listed(keys: ConfigKeys, count: int) -> list[bool] | None:
    """Return which layers have an indexer by ``indexer_types``; None if the key is missing."""
    if not keys.has("indexer_types"):
        return None
    return [
        indexer_type == "full"
        for indexer_type in keys.sequence("indexer_types", count, ("full", "shared"))
    ]


MODELS: ModelTable = {
    **dict.fromkeys(
        (
            *("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2", "mistral4"),
            *("pangu_ultra_moe", "sarvam_mla"),
        ),
        _deepseek,
    ),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), _deepseek_sparse),
    "hy_v4": _hy_v4,
    "longcat_flash": _longcat_flash,
    "minicpm3": _minicpm3,
}
