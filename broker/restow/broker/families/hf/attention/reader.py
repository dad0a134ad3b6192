"""`Gqa` reads configs whose attention layers are all of one shape, in windows or not.

Windows are vLLM's (`engine/arg_utils.py`, `model_executor/layers/attention/attention.py`): one of
``sliding_window`` tokens holds the token itself, so the next one sees one less before it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from restow.broker.families.hf.keys import Keys
from restow.broker.families.hf.layers import Layers, layers_by_kind
from restow.broker.families.hf.types import Types

Kinds = Callable[[Keys, int], list[str]]
"""The kinds of so many layers, where a config does not list them."""


def every(period: int, key: str = "", first: int = 0) -> Kinds:
    """Return kinds with full attention once in a ``period``, which a config may say in ``key``.

    Full ones stand last in their period, or ``first`` layers before its end.
    """

    def kinds(keys: Keys, count: int) -> list[str]:
        size = keys.number(key, period) if key else period
        return ["sliding" if (i + 1 + first) % size else "attention" for i in range(count)]

    return kinds


def full(_keys: Keys, count: int) -> list[str]:
    """Return kinds without windows, though a config may list some."""
    return ["attention"] * count


@dataclass(frozen=True, slots=True)
class Gqa:
    """Reads a config by the defaults of its configuration class.

    ``kv_heads`` and ``head_dim`` None: one for each head, the head's share of ``hidden``. A number
    that is None too must be in the config. ``kinds`` are those of layers that are not listed; None:
    the class lists none, so that a window holds for all. vLLM looks at the list if ``by_layer``,
    and at ``head_dim`` if ``sized``; it starts no ``uniform`` model that has windows in some of its
    layers. ``gate`` is a key without which there are no windows, ``extra``
    what vLLM adds to them, ``names`` other words for these keys.
    """

    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    window: int | None = None
    kinds: Kinds | None = None
    by_layer: bool = True
    sized: bool = True
    uniform: bool = False
    gate: str = ""
    extra: int = 0
    names: tuple[tuple[str, str], ...] = ()

    def __call__(self, keys: Keys, types: Types) -> Layers:
        """Return what each layer keeps. Raises `LayoutFormError`."""
        keys = self.renamed(keys)
        if keys.has("per_layer_config"):
            raise keys.wrong(
                "per_layer_config", keys.config["per_layer_config"], "known for this type"
            )
        kv_heads, head_dim = self.shape(keys)
        kinds, window_tokens = self.windows(keys)
        attention = types.attention(kv_heads, head_dim)
        return layers_by_kind(
            keys, kinds, attention, None, replace(attention, window_tokens=window_tokens)
        )

    def renamed(self, keys: Keys) -> Keys:
        """Return the keys under the names that most configs have."""
        for name, other in self.names:
            if not keys.has(name) and other in keys.config:
                keys = keys.put(name, keys.config[other], other)
        return keys

    def shape(self, keys: Keys) -> tuple[int, int]:
        """Return how many heads have keys, and their size. Raises `LayoutFormError`."""
        heads = keys.number("num_attention_heads", self.heads)
        key = "num_key_value_heads"
        own = self.kv_heads if key not in keys.config else None
        kv_heads = keys.number(key, own or heads)
        if heads % kv_heads:
            raise keys.wrong(key, kv_heads, f"a divisor of num_attention_heads, {heads}")
        if self.sized and keys.has("head_dim"):
            return kv_heads, keys.number("head_dim")
        if self.sized and self.head_dim and "head_dim" not in keys.config:
            return kv_heads, keys.number("head_dim", self.head_dim)
        hidden = keys.number("hidden_size", self.hidden)
        if hidden % heads:
            wanted = f"a multiple of num_attention_heads, {heads}, and there is no head_dim"
            raise keys.wrong("hidden_size", hidden, wanted)
        return kv_heads, hidden // heads

    def windows(self, keys: Keys) -> tuple[list[str], int]:
        """Return the kinds of all layers, and how many tokens the next one sees in a window."""
        if (both := keys.config.get("use_bidirectional_attention")) not in (None, False, "vision"):
            raise keys.wrong("use_bidirectional_attention", both, "of a model that decodes")
        count = keys.number("num_hidden_layers", self.layers)
        listed = keys.listed_kinds(count)
        window = self._window(keys)
        if not window:
            return ["attention"] * count, 0
        if window == 1:
            raise keys.wrong("sliding_window", window, "0, or 2 or more tokens")
        kinds = listed or (self.kinds(keys, count) if self.kinds else ["sliding"] * count)
        if self.uniform and len(set(kinds)) > 1:
            said = (
                ": windows in some of the layers (max_window_layers): vLLM serves this model type "
                "with windows in all of them or in none"
            )
            raise keys.fault("layer_types", said)
        if not self.by_layer and "attention" in kinds:
            kinds = ["attention"] * count
        return kinds, window - 1 + self.extra

    def _window(self, keys: Keys) -> int:
        if self.gate and not keys.config.get(self.gate, False):
            return 0
        key = "sliding_window"
        default = 0 if key in keys.config else self.window or 0
        return keys.number(key, default, least=0)
