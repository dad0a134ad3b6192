"""`Keys` reads a config's keys with their defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from restow.broker.errors import LayoutFormError
from restow.broker.layout import DType

FLOATS = "float32, bfloat16 or float16"
"""The types that models compute with, and keep their states in."""

_KINDS = {
    "M": "recurrent",
    "mamba": "recurrent",
    "linear_attention": "recurrent",
    "conv": "recurrent",
    "*": "attention",
    "attention": "attention",
    "full_attention": "attention",
    "sliding_attention": "sliding",
    "-": "none",
    "mlp": "none",
    "E": "none",
    "moe": "none",
    "hybrid": "both",
}
"""What a layer's name, or its letter in a pattern, says about its state."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Reads a config's keys with their defaults; a null is as good as nothing.

    Every method raises `LayoutFormError` that names the key at fault.
    """

    config: Mapping[str, Any]

    def __post_init__(self) -> None:
        """Refuse what is no object."""
        if not isinstance(self.config, Mapping):
            raise LayoutFormError(f"config: expected an object, got {type(self.config).__name__}")

    def has(self, key: str) -> bool:
        """Return whether the key is there and not null."""
        return self.config.get(key) is not None

    def text(self, key: str) -> str:
        """Return a word that must be there."""
        value = self.config.get(key)
        if not isinstance(value, str) or not value:
            raise wrong(key, value, "a name")
        return value

    def number(self, key: str, default: int | None = None, least: int = 1) -> int:
        """Return an integer from ``least`` on; without a default it must be there."""
        value = self.config.get(key)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise wrong(key, value, f"an integer from {least} on")
        return value

    def dtype(self, key: str, default: DType, unless_named: DType | None = None) -> DType:
        """Return a dtype; ``default`` for "auto" and for nothing, unless the family has its own."""
        value = self.config.get(key)
        if value is None:
            return unless_named or default
        if value == "auto":
            return default
        try:
            dtype = DType.parse(str(value).removeprefix("torch."))
        except LayoutFormError as error:
            raise LayoutFormError(f"config: {key}: {error.message}", key=key) from None
        if not dtype.castable:
            raise wrong(key, value, FLOATS)
        return dtype

    def kinds(self, key: str) -> list[str]:
        """Return the kinds of all layers, from a list of names or a pattern of letters."""
        names = self.config[key]
        if not isinstance(names, list | tuple | str):
            raise wrong(key, names, "a list of layer types")
        for index, name in enumerate(names):
            if not isinstance(name, str) or name not in _KINDS:
                known = ", ".join(_KINDS)
                raise LayoutFormError(
                    f"config: {key}[{index}]: layer type {name!r} is unknown; known are {known}",
                    key=key,
                )
        return [_KINDS[name] for name in names]

    def listed_kinds(self, default_count: int = 32) -> list[str] | None:
        """Return the kinds of all layers where the config lists them; None where it does not."""
        key = next((k for k in ("layers_block_type", "layer_types") if self.has(k)), None)
        if key is None:
            return None
        kinds, count = self.kinds(key), self.number("num_hidden_layers", default_count)
        if len(kinds) != count:
            raise LayoutFormError(
                f"config: {key} lists {len(kinds)} layers, num_hidden_layers says {count}", key=key
            )
        return kinds

    def indices(self, key: str) -> list[int]:
        """Return a list of layer numbers; empty where there is none."""
        listed = self.config.get(key) or []
        if not isinstance(listed, list | tuple) or not all(isinstance(i, int) for i in listed):
            raise wrong(key, listed, "a list of layer numbers")
        return list(listed)

    def kv_heads(self, default: int | None) -> int:
        """Return how many heads have keys; without grouped queries each has its own."""
        key = "num_key_value_heads"
        if not self.has(key) and (default is None or key in self.config):
            return self.number("num_attention_heads", 32)
        return self.number(key, default)

    def head_dim(self) -> int:
        """Return an attention head's share of the hidden size, unless it has a size of its own."""
        if self.has("head_dim"):
            return self.number("head_dim")
        return self.number("hidden_size", 4096) // self.number("num_attention_heads", 32)

    def mamba_head_dim(self, channels: int, heads: int) -> int:
        """Return ``mamba_d_head``, which "auto" leaves to the number of channels."""
        if channels % heads:
            raise LayoutFormError(
                f"config: mamba_n_heads {heads} does not divide the {channels} channels",
                key="mamba_n_heads",
            )
        if self.config.get("mamba_d_head", "auto") in ("auto", None):
            return channels // heads
        size = self.number("mamba_d_head")
        if size * heads != channels:
            raise LayoutFormError(
                f"config: mamba_n_heads {heads} of mamba_d_head {size} are not the {channels} "
                f"channels",
                key="mamba_d_head",
            )
        return size


def wrong(key: str, value: object, wanted: str) -> LayoutFormError:
    """Return what to raise about a key."""
    what = f"{key!r} is missing" if value is None else f"{key}: {value!r:.60} is not {wanted}"
    return LayoutFormError(f"config: {what}", key=key)
