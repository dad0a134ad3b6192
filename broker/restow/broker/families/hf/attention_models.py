"""Models with attention alone, some of it in sliding windows."""

from __future__ import annotations

from dataclasses import replace

from restow.broker.families.hf.keys import Keys
from restow.broker.families.hf.layers import Layers, ModelTable, layers_by_kind
from restow.broker.families.hf.types import Types


def _gemma3(keys: Keys, types: Types) -> Layers:
    """Gemma 3: sliding windows, and full attention in every sixth layer."""
    kinds = keys.listed_kinds(26)
    if kinds is None:
        count = keys.number("num_hidden_layers", 26)
        pattern = keys.number("sliding_window_pattern", 6)
        kinds = ["sliding" if (i + 1) % pattern else "attention" for i in range(count)]
    attention = types.attention(keys.kv_heads(4), keys.number("head_dim", 256))
    sliding = replace(attention, window_tokens=keys.number("sliding_window", 4096))
    return layers_by_kind(kinds, attention, None, sliding)


MODELS: ModelTable = {
    "gemma3": _gemma3,
    "gemma3_text": _gemma3,
}
