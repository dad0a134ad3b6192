"""Models with attention alone whose layers are not of one shape, or have no cache of their own."""

from __future__ import annotations

from dataclasses import replace

from restow.broker.families.hf.attention.reader import Gqa, every, full
from restow.broker.families.hf.keys import Keys
from restow.broker.families.hf.layers import Layers, ModelTable, layers_by_kind
from restow.broker.families.hf.types import Types
from restow.broker.families.specs import AttentionSpec

_GEMMA3N = Gqa(35, 2048, 8, 2, 256, window=512, kinds=every(5))
_GEMMA4 = Gqa(30, 2304, 8, 4, 256, window=512, kinds=every(6))
_LLAMA4 = Gqa(48, 5120, 40, 8, 128)
_STEP3P5 = Gqa(
    48,
    5120,
    40,
    8,
    kinds=every(2),
    names=(("num_key_value_heads", "num_attention_groups"),),
)
_STEP3P7 = replace(_STEP3P5, layers=45, hidden=4096, heads=64, head_dim=128, kinds=full)


def _gemma3n(keys: Keys, types: Types) -> Layers:
    """Gemma 3n: the last layers read the caches of earlier ones, and have none."""
    layers = _GEMMA3N(keys, types)
    return _first(layers, keys, 15)


def _gemma4(keys: Keys, types: Types) -> Layers:
    """Gemma 4, by the defaults of its text class."""
    return _two_sizes(keys, types, _GEMMA4)


def _gemma4_unified(keys: Keys, types: Types) -> Layers:
    """Gemma 4 for all modalities: as Gemma 4, with longer windows."""
    return _two_sizes(keys, types, replace(_GEMMA4, window=1024))


def _two_sizes(keys: Keys, types: Types, form: Gqa) -> Layers:
    """As Gemma 3n, and layers without a window have heads of their own size and number.

    Later checkpoints have these, layer by layer, in ``per_layer_config``.
    """
    own = keys.part("per_layer_config")
    keys = keys.put("per_layer_config", None)
    kinds, window_tokens = form.windows(keys)
    kinds = [*kinds[:-1], "attention"]  # as the configuration class has it
    kv_heads, head_dim = form.shape(keys)
    layers: Layers = []
    for index, kind in enumerate(kinds):
        heads, dim, window = kv_heads, head_dim, window_tokens
        if kind == "attention":
            window = 0
            if not own.config:
                dim = keys.number("global_head_dim", 512)
                if keys.config.get("attention_k_eq_v", False):
                    heads = keys.number("num_global_key_value_heads", kv_heads)
        one = own.part(str(index))
        heads, dim = one.number("num_key_value_heads", heads), one.number("head_dim", dim)
        layers.append((replace(types.attention(heads, dim), layer=index, window_tokens=window),))
    return _first(layers, keys, 0, kinds)


def _first(layers: Layers, keys: Keys, default: int, kinds: list[str] | None = None) -> Layers:
    """Return the layers, without the caches of the last ones, which share others'.

    Raises `LayoutFormError`.
    """
    shared = keys.number("num_kv_shared_layers", default, least=0)
    kept = len(layers) - shared
    if shared and (kept < 2 or (kinds and not set(kinds[kept:]) <= set(kinds[:kept]))):
        raise keys.wrong(
            "num_kv_shared_layers", shared, f"less than the {len(layers)} layers that it is among"
        )
    return [*layers[:kept], *((),) * shared]


def _llama4(keys: Keys, types: Types) -> Layers:
    """Llama 4: attention in chunks, whose layers keep all tokens where vLLM is told so."""
    count = keys.number("num_hidden_layers", 48)
    listed = keys.config.get("layer_types")
    if listed is not None and (not isinstance(listed, list | tuple) or len(listed) != count):
        raise keys.wrong("layer_types", listed, f"a list of {count} layers (num_hidden_layers)")
    return _LLAMA4(keys.put("layer_types", None), types)


def _mimo_v2(keys: Keys, types: Types) -> Layers:
    """MiMo-V2: layers with windows have heads of their own number and size, and values theirs."""
    count = keys.number("num_hidden_layers")
    pattern = keys.config.get("hybrid_layer_pattern")
    if (
        not isinstance(pattern, list | tuple)
        or len(pattern) != count
        or any(one not in (0, 1) for one in pattern)
    ):
        wanted = f"a list of {count} layers (num_hidden_layers), each 0 or 1"
        raise keys.wrong("hybrid_layer_pattern", pattern, wanted)
    keys.took("hybrid_layer_pattern")
    attention = _attention(keys, types, "")
    sliding = attention
    if 1 in pattern:
        window = keys.number(("sliding_window_size", "sliding_window"), least=2)
        sliding = replace(_attention(keys, types, "swa_"), window_tokens=window - 1)
    return layers_by_kind(
        keys, ["sliding" if one else "attention" for one in pattern], attention, None, sliding
    )


def _attention(keys: Keys, types: Types, prefix: str) -> AttentionSpec:
    """Return a layer by the keys that begin with ``prefix``."""
    heads = keys.number(f"{prefix}num_attention_heads")
    kv_heads = keys.number(f"{prefix}num_key_value_heads")
    if heads % kv_heads:
        wanted = f"a divisor of {prefix}num_attention_heads, {heads}"
        raise keys.wrong(f"{prefix}num_key_value_heads", kv_heads, wanted)
    head_dim = keys.number(f"{prefix}head_dim")
    value_dim = keys.number(f"{prefix}v_head_dim", head_dim)
    attention = types.attention(kv_heads, head_dim)
    return attention if value_dim == head_dim else replace(attention, value_dim=value_dim)


def _step3p5(keys: Keys, types: Types) -> Layers:
    """Step 3.5: one kind of layers may have other heads (``attention_other_setting``)."""
    return _step(keys, types, _STEP3P5)


def _step3p7(keys: Keys, types: Types) -> Layers:
    """Step 3.7's text part: as Step 3.5, by other defaults."""
    return _step(keys, types, _STEP3P7)


def _step(keys: Keys, types: Types, form: Gqa) -> Layers:
    count = keys.number("num_hidden_layers", form.layers)
    listed = keys.config.get("layer_types") or None
    if isinstance(listed, list | tuple):  # checkpoints list those of drafts behind
        listed = listed[:count]
    keys = form.renamed(keys.put("layer_types", listed))
    kinds, window_tokens = form.windows(keys)
    kv_heads, head_dim = form.shape(keys)
    other = keys.part("attention_other_setting")
    others = other.text("attention_type") if other.config and listed else None
    layers: Layers = []
    for index, kind in enumerate(kinds):
        heads, dim = kv_heads, head_dim
        if listed and listed[index] == others:
            heads, dim = other.number("num_attention_groups"), other.number("head_dim", dim)
        window = window_tokens if kind == "sliding" else 0
        layers.append((replace(types.attention(heads, dim), layer=index, window_tokens=window),))
    return layers


def _nemotron_nas(keys: Keys, types: Types) -> Layers:
    """Llama-Nemotron: a block has attention with queries in groups of its own size, or none."""
    count, heads = keys.number("num_hidden_layers"), keys.number("num_attention_heads")
    blocks = keys.config.get("block_configs")
    if not isinstance(blocks, list | tuple) or len(blocks) != count:
        raise keys.wrong("block_configs", blocks, f"a list of {count} blocks (num_hidden_layers)")
    layers: Layers = []
    for index, block in enumerate(blocks):
        one = Keys(block, f"{keys.path}block_configs[{index}].", keys.readings)
        attention = one.part("attention")
        if attention.config.get("no_op"):
            layers.append(())
            continue
        if attention.config.get("replace_with_linear"):
            raise attention.fault("replace_with_linear", " is nothing that vLLM knows")
        group = attention.number("n_heads_in_group")
        if heads % group:
            raise attention.wrong(
                "n_heads_in_group", group, f"a divisor of num_attention_heads, {heads}"
            )
        form = keys.put("num_key_value_heads", heads // group)
        spec = types.attention(*Gqa().shape(form))
        layers.append((replace(spec, layer=index),))
    return layers


UNEVEN: ModelTable = {
    "gemma3n_text": _gemma3n,
    "gemma4_text": _gemma4,
    "gemma4_unified_text": _gemma4_unified,
    "llama4_text": _llama4,
    "mimo_v2": _mimo_v2,
    "mimo_v2_flash": _mimo_v2,
    "nemotron-nas": _nemotron_nas,
    "step3p5": _step3p5,
    "step3p7_text": _step3p7,
}
