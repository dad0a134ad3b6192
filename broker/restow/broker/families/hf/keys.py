"""`Keys` reads a config's keys with their defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from restow.broker.errors import LayoutFormError
from restow.broker.families.hf.readings import CONFIG, Reading, Readings
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

MAX_LAYERS = 4096
"""A config that says more of them than this lies."""
MAX_NUMBER = 2**31 - 1
_LAYER_COUNT = "num_hidden_layers"
_OLDER_NAMES = {
    _LAYER_COUNT: ("n_layer", "n_layers"),
    "hidden_size": ("d_model", "n_embd"),
    "num_attention_heads": ("n_head", "n_heads"),
}
"""Names that a family's first checkpoints had, from before transformers had the family."""
_DRAFT_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
_DEFAULT = "the default of the model's configuration class"


@dataclass(frozen=True, slots=True)
class Keys:
    """Reads a config's keys with their defaults; a null is as good as nothing.

    ``path`` stands before the keys of a part of the config, and ``origins`` has the file's own
    words for some keys. What is read and what is assumed is said to ``readings``. Every method
    raises `LayoutFormError` that names the key at fault.
    """

    config: Mapping[str, Any]
    path: str = ""
    readings: Readings = field(default_factory=Readings, compare=False)
    origins: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what is no object."""
        if not isinstance(self.config, Mapping):
            what = f"expected an object, got {type(self.config).__name__}"
            raise LayoutFormError(f"config: {self.path and self.path[:-1] + ': '}{what}")

    def put(self, key: str, value: object, origin: str = "") -> Keys:
        """Return the keys with another value; what is said of it is said of ``origin``."""
        origins = {**self.origins, key: origin or key}
        return replace(self, config={**self.config, key: value}, origins=origins)

    def name(self, key: str) -> str:
        """Return what the key is called in the file, with its path."""
        return self.path + self.origins.get(key, key)

    def has(self, key: str) -> bool:
        """Return whether the key is there and not null."""
        return self.config.get(key) is not None

    def part(self, key: str) -> Keys:
        """Return the keys of an object inside; none where it is not there."""
        value = self.config.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise self.wrong(key, value, "an object")
        return Keys(value or {}, f"{self.path}{key}.", self.readings)

    def text(self, key: str) -> str:
        """Return a word that must be there."""
        value = self.config.get(key)
        if not isinstance(value, str) or not value:
            raise self.wrong(key, value, "a name")
        self.took(key)
        return value

    def number(self, key: str | tuple[str, ...], default: int | None = None, least: int = 1) -> int:
        """Return an integer from ``least`` on; without a default it must be there.

        Of several keys, which are names of one thing, the first one that is there counts.
        """
        names = (key,) if isinstance(key, str) else key
        name = next((one for one in names if self.has(one)), names[0])
        value = self.config.get(name)
        if value is None:
            self._check_older_names(name)
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.wrong(name, value, f"an integer from {least} on")
        most = MAX_LAYERS if name == _LAYER_COUNT else MAX_NUMBER
        if value > most:
            raise self.wrong(name, value, f"an integer of at most {most}")
        self.took(name) if self.has(name) else self.assumed(name, value)
        return value

    def dtype(self, key: str, default: DType, unless_named: DType | None = None) -> DType:
        """Return a dtype; ``default`` for "auto" and for nothing, unless the family has its own."""
        value = self.config.get(key)
        if value is None:
            if unless_named is not None:
                self.assumed(key, unless_named.label)
            return unless_named or default
        self.took(key)
        if value == "auto":
            return default
        try:
            dtype = DType.parse(str(value).removeprefix("torch."))
        except LayoutFormError as error:
            raise self.fault(key, f": {error.message:.120}") from None
        if not dtype.castable:
            raise self.wrong(key, value, FLOATS)
        return dtype

    def kinds(self, key: str) -> list[str]:
        """Return the kinds of all layers, from a list of names or a pattern of letters."""
        names = self.config[key]
        if not isinstance(names, list | tuple | str):
            raise self.wrong(key, names, "a list of layer types")
        for index, name in enumerate(names):
            if not isinstance(name, str) or name not in _KINDS:
                known = ", ".join(_KINDS)
                said = f"[{index}]: layer type {name!r:.60} is unknown; known are {known}"
                raise self.fault(key, said)
        self.took(key)
        return [_KINDS[name] for name in names]

    def listed_kinds(self, default_count: int = 32) -> list[str] | None:
        """Return the kinds of all layers where the config lists them; None where it does not."""
        key = next((k for k in ("layers_block_type", "layer_types") if self.has(k)), None)
        if key is None:
            return None
        return self.as_many(key, self.kinds(key), self.number(_LAYER_COUNT, default_count))

    def as_many(self, key: str, kinds: list[str], count: int) -> list[str]:
        """Return the kinds of ``count`` layers, which a list says; layers of drafts may follow."""
        drafts = next((k for k in _DRAFT_LAYERS if self.has(k)), None)
        if drafts and len(kinds) == count + self.number(drafts, least=0):
            kinds = kinds[:count]
        if len(kinds) != count:
            raise self.fault(key, f" lists {len(kinds)} layers, {_LAYER_COUNT} says {count}")
        return kinds

    def indices(self, key: str, within: range | None = None) -> list[int]:
        """Return a list of layer numbers, each at most once; empty where there is none."""
        listed = self.config.get(key)
        if listed is None:
            return []
        if not isinstance(listed, list | tuple) or not all(type(i) is int for i in listed):
            raise self.wrong(key, listed, "a list of layer numbers")
        wrong_ones = [i for i in listed if within is not None and i not in within]
        if within is not None and wrong_ones:
            raise self.wrong(key, wrong_ones, f"from {within.start} to {within.stop - 1}")
        if len(set(listed)) != len(listed):
            raise self.wrong(key, listed, "a list of different layers")
        self.took(key)
        return list(listed)

    def kv_heads(self, default: int | None) -> int:
        """Return how many heads have keys; without grouped queries each has its own."""
        key = "num_key_value_heads"
        if not self.has(key) and (default is None or key in self.config):
            return self.number("num_attention_heads", 32)
        count, heads = self.number(key, default), self.config.get("num_attention_heads")
        if isinstance(heads, int) and heads % count:
            raise self.wrong(key, count, f"a divisor of num_attention_heads, {heads!r:.20}")
        return count

    def head_dim(self, hidden: int = 4096, heads: int = 32) -> int:
        """Return an attention head's share of the hidden size, unless it has a size of its own.

        ``hidden`` and ``heads`` are defaults.
        """
        if self.has("head_dim"):
            return self.number("head_dim")
        hidden = self.number("hidden_size", hidden)
        return self.share("num_attention_heads", heads, hidden, "hidden_size")

    def share(self, key: str, default: int, whole: int, what: str) -> int:
        """Return the share of ``whole`` that each of so many, as ``key`` says, has of it."""
        count = self.number(key, default)
        if whole % count:
            raise self.wrong(key, count, f"a divisor of {what}, {whole}")
        return whole // count

    def mamba_head_dim(self, channels: int, heads: int) -> int:
        """Return ``mamba_d_head``, which "auto" leaves to the number of channels."""
        if channels % heads:
            said = f" {heads} does not divide the {channels} channels"
            raise self.fault("mamba_n_heads", said)
        if self.config.get("mamba_d_head", "auto") in ("auto", None):
            return channels // heads
        size = self.number("mamba_d_head")
        if size * heads != channels:
            said = f" {size} for mamba_n_heads {heads} are not the {channels} channels"
            raise self.fault("mamba_d_head", said)
        return size

    def took(self, key: str, note: str = "") -> None:
        """Say that the value of the key was taken."""
        self.readings.add(Reading(self.name(key), self.config.get(key), CONFIG, note))

    def assumed(self, key: str, value: object, note: str = _DEFAULT) -> None:
        """Say that a value was assumed, for the config has none."""
        self.readings.add(Reading(self.name(key), value, "", note))

    def leave_out_drafts(self) -> None:
        """Say that layers of drafts (MTP) are left out, if there are some."""
        for key in _DRAFT_LAYERS:
            if self.has(key) and self.number(key, least=0):
                self.took(
                    key, "left out: layers of drafts that no engine runs (else: --draft-layers)"
                )

    def fault(self, key: str, said: str) -> LayoutFormError:
        """Return what to raise about a key, of which ``said`` tells more than its value."""
        return LayoutFormError(f"config: {self.name(key)}{said}", key=self.name(key))

    def wrong(self, key: str, value: object, wanted: str) -> LayoutFormError:
        """Return what to raise about a key."""
        if value is None and key in self.config:
            return self.fault(key, f": null is not {wanted}")
        if value is None:
            name = self.name(key)
            return LayoutFormError(f"config: {name!r} is missing", key=name)
        return self.fault(key, f": {value!r:.60} is not {wanted}")

    def _check_older_names(self, key: str) -> None:
        """Refuse a config that has the number under a name which this model type's has not."""
        for old in _OLDER_NAMES.get(key, ()):
            if self.has(old):
                raise self.fault(
                    old,
                    f": {self.config[old]!r:.60}: the configuration class of this model type has "
                    f"it as {key!r}: this is an older form, or another model's",
                )
