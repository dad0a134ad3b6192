"""Models whose latent attention reads the tokens that an indexer chooses (DeepSeek sparse)."""

from __future__ import annotations

from dataclasses import replace

from restow.broker.errors import LayoutFormError
from restow.broker.families.hf.keys import Keys
from restow.broker.families.hf.latent_models import latent, latent_dims
from restow.broker.families.hf.layers import Layers, ModelTable
from restow.broker.families.hf.types import Types
from restow.broker.families.specs import BlockScaledMlaSpec, IndexerSpec, LatentSpec, ScaleKind
from restow.broker.layout import DType

_PAGE_TOKENS = 64
"""Of the indexer's kernels on CUDA (vLLM `DeepseekV32IndexerBackend`)."""
_BLOCK_DIM = 128
"""Elements of an indexer's key that share a scale (vLLM `Indexer.quant_block_size`)."""
_SPARSE = ("sparse_attention", "sparse", "indexed_attention", "deepseek_sparse_attention")
"""Names of layers with an indexer, where a config has layers of both kinds."""


def _deepseek_sparse(keys: Keys, types: Types) -> Layers:
    """DeepSeek-V3.2, GLM-5: every layer is sparse; some read what an earlier one has chosen."""
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
    return _layers(keys, types, choosing)


def _hy_v4(keys: Keys, types: Types) -> Layers:
    """HY V4: ``layer_types`` says which are sparse, ``indexer_types`` which of these choose."""
    count = keys.number("num_hidden_layers")
    kinds = keys.config.get("layer_types") or []
    if kinds and (not isinstance(kinds, list | tuple) or len(kinds) != count):
        raise keys.wrong(
            "layer_types", kinds, f"a list of {count} layers, as num_hidden_layers says"
        )
    sparse = [kind in _SPARSE for kind in kinds] or [False] * count
    listed = _listed(keys, count)
    choosing = [i == 0 or i % 4 == 1 for i in range(count)] if listed is None else listed
    if types.scales.kind is ScaleKind.PER_BLOCK and not all(sparse):
        said = ": not all layers are sparse, and only those have scales per block"
        raise keys.fault("layer_types", said)
    return _layers(keys, types, [a and b for a, b in zip(sparse, choosing, strict=True)])


def _layers(keys: Keys, types: Types, choosing: list[bool]) -> Layers:
    """Return latents for every layer, with the keys of an indexer for those that choose tokens."""
    spec, indexer = _latent(keys, types), _indexer(keys)
    return [
        (replace(spec, layer=i), replace(indexer, layer=i)) if own else (replace(spec, layer=i),)
        for i, own in enumerate(choosing)
    ]


def _latent(keys: Keys, types: Types) -> LatentSpec:
    if types.scales.kind is not ScaleKind.PER_BLOCK:
        return latent(keys, types)
    spec = BlockScaledMlaSpec(0)
    if types.kv is not DType.FLOAT8_E4M3FN:
        raise LayoutFormError(
            f"latents with scales per block are float8_e4m3fn, not {types.kv.label}"
        )
    if latent_dims(keys) != (spec.latent_dim, spec.rope_dim):
        sizes = " and ".join(map(str, latent_dims(keys)))
        raise keys.fault(
            "kv_lora_rank",
            f" and qk_rope_head_dim: {sizes}: latents with scales per block (vLLM fp8_ds_mla) "
            f"have {spec.latent_dim} and {spec.rope_dim}",
        )
    return spec


def _indexer(keys: Keys) -> IndexerSpec:
    key_dim = keys.number("index_head_dim", 128)
    if key_dim % _BLOCK_DIM:
        raise keys.wrong(
            "index_head_dim", key_dim, f"a multiple of {_BLOCK_DIM}, which a scale is for"
        )
    return IndexerSpec(0, key_dim, _BLOCK_DIM, _PAGE_TOKENS)


def _by_pattern(keys: Keys, count: int) -> list[bool]:
    """Return which layers have an indexer, as vLLM finds it (`DeepseekV32Attention`)."""
    pattern = keys.config.get("index_topk_pattern")
    if pattern is None:
        every = keys.number("index_topk_freq", 1)
        offset = keys.number("index_skip_topk_offset", 2, least=0)
        return [max(i - offset + 1, 0) % every == 0 for i in range(count)]
    if not isinstance(pattern, str | list | tuple) or any(one not in ("F", "S") for one in pattern):
        raise keys.wrong("index_topk_pattern", pattern, "a pattern of F (full) and S (shared)")
    if len(pattern) < count:
        said = f" names {len(pattern)} layers, num_hidden_layers says {count}"
        raise keys.fault("index_topk_pattern", said)
    return [one == "F" for one in pattern[:count]]


def _listed(keys: Keys, count: int) -> list[bool] | None:
    """Return which layers have an indexer where ``indexer_types`` lists them; None: it does not."""
    if not keys.has("indexer_types"):
        return None
    names = keys.config["indexer_types"]
    if not isinstance(names, list | tuple) or any(one not in ("full", "shared") for one in names):
        raise keys.wrong("indexer_types", names, "a list of 'full' and 'shared'")
    if len(names) != count:
        said = f" lists {len(names)} layers, num_hidden_layers says {count}"
        raise keys.fault("indexer_types", said)
    return [one == "full" for one in names]


MODELS: ModelTable = {
    "deepseek_v32": _deepseek_sparse,
    "glm_moe_dsa": _deepseek_sparse,
    "hy_v4": _hy_v4,
}
