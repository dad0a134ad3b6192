"""Read the keys of a config.json, with the defaults of the model type's configuration class.

A config may leave keys out. `ConfigKeys` then asks transformers' configuration class of the model
type, if transformers is installed (the ``engine`` extra); without it a key that is needed must be
in the file. The classes are imported when the first key is missing: transformers imports torch with
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from restow.broker.errors import LayoutFormError
from restow.broker.layout import DType

CONFIG = "config.json"
QUANT_CONFIG = "hf_quant_config.json"
"""ModelOpt's file beside config.json."""
FLOATS = "float32, bfloat16 or float16"
"""Types in which models compute and keep their recurrent states."""

_KINDS = {
    **dict.fromkeys(("M", "mamba", "linear_attention", "conv"), "recurrent"),
    **dict.fromkeys(("*", "attention", "full_attention"), "attention"),
    "sliding_attention": "sliding",
    **dict.fromkeys(("-", "mlp", "E", "moe"), "none"),
    "hybrid": "both",
}
"""The state of a layer by its name, or by its letter in a pattern."""

MAX_LAYERS = 4096
"""No model has more layers."""
MAX_NUMBER = 2**31 - 1
_LAYER_COUNT = "num_hidden_layers"
_OLDER_NAMES = {
    _LAYER_COUNT: ("n_layer", "n_layers"),
    "hidden_size": ("d_model", "n_embd"),
    "num_attention_heads": ("n_head", "n_heads"),
}
"""Names in a family's first checkpoints, from before transformers had the family."""
_LISTS = ("layers_block_type", "layer_types")
_DRAFT_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")

_SAME_CLASS = {"dots_ocr": "qwen2", "kimi_k2": "deepseek_v3", "step3p7_text": "step3p5"}
"""Model types that have the configuration class of another type."""
_VLLM_CLASSES: dict[str, dict[str, int]] = {
    "beam": {},
    "bailing_hybrid": {"kv_lora_rank": 512, "qk_rope_head_dim": 64},
    "chatglm": {_LAYER_COUNT: 28, "hidden_size": 4096, "num_attention_heads": 32},
    "flint": {},
    "internlm3": {},
    "iquestcoder": {},
    "mimo_v2_flash": {},
    "step3_text": {
        _LAYER_COUNT: 61,
        "hidden_size": 7168,
        "num_attention_heads": 64,
        "head_dim": 256,
    },
    "step3p5": {},
}
"""Defaults of types that vLLM reads with its own class; with {}, the file must say all."""
_LEAST_TRANSFORMERS = (5, 19)
"""From this version on the defaults are attributes of the classes."""
_CLASS_DEFAULT = "the default of the model's configuration class"


@dataclass(frozen=True, slots=True)
class Reading:
    """The value of a key and the file that says it; without a file the value was assumed.

    ``note`` says why it was assumed, or what was made of the value if that differs.
    """

    key: str
    value: object
    file: str = ""
    note: str = ""


@dataclass(slots=True)
class Readings:
    """The readings of a config, in the order in which keys were first read."""

    _by_key: dict[str, Reading] = field(default_factory=dict)

    def add(self, reading: Reading) -> None:
        """Keep a reading; a value from a file replaces an assumed value."""
        known = self._by_key.get(reading.key)
        if known is None or (reading.file and (reading.note or not known.file)):
            self._by_key[reading.key] = reading

    def __iter__(self) -> Iterator[Reading]:
        """Iterate over the readings."""
        return iter(self._by_key.values())


def configuration_class(model_type: str) -> Any:
    """Return transformers' configuration class of a model type, or None if there is none.

    Raises `ImportError` if transformers is not installed, or too old.
    """
    import transformers

    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if version < _LEAST_TRANSFORMERS:
        raise ImportError(f"transformers {transformers.__version__} is too old")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    name = _SAME_CLASS.get(model_type, model_type)
    # The mapping imports a class only in __getitem__.
    mapped = CONFIG_MAPPING[name] if name in CONFIG_MAPPING else None  # noqa: SIM401
    # An engine in this process may have registered classes of its own.
    own = mapped is not None and mapped.__module__.startswith("transformers.models.")
    return mapped if own else None


def _class_list(config_class: Any, **numbers: object) -> Any:
    """Return the layer types that a configuration class makes of numbers, or None."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        made = None if config_class is None else config_class(**numbers)
    except StrictDataclassError:  # its list has another number of layers
        return None
    return next((names for key in _LISTS if (names := getattr(made, key, None))), None)


@dataclass(frozen=True, slots=True)
class ConfigKeys:
    """The keys of a config, or of a part of it; a null counts as missing.

    ``path`` precedes the keys of a part, and ``origins`` maps keys to their names in the file.
    ``model_type`` names the configuration class that has the defaults, or is empty. Values
    read and values assumed are added to ``readings``. Every method raises `LayoutFormError`, naming
    the key at fault.
    """

    config: Mapping[str, Any]
    path: str = ""
    readings: Readings = field(default_factory=Readings, compare=False)
    origins: Mapping[str, str] = field(default_factory=dict)
    model_type: str = ""

    def __post_init__(self) -> None:
        """Refuse a config that is no object."""
        if not isinstance(self.config, Mapping):
            problem = f"expected an object, got {type(self.config).__name__}"
            raise LayoutFormError(f"config: {self.path and self.path[:-1] + ': '}{problem}")

    def put(self, key: str, value: object, origin: str = "") -> ConfigKeys:
        """Return the keys with another value, which the file has under the name ``origin``."""
        origins = {**self.origins, key: origin or key}
        return replace(self, config={**self.config, key: value}, origins=origins)

    def renamed(self, names: Mapping[str, str]) -> ConfigKeys:
        """Return the keys under their usual names; ``names`` maps them to the file's names."""
        keys = self
        for name, file_name in names.items():
            if not keys.has(name) and file_name in keys.config:
                keys = keys.put(name, keys.config[file_name], file_name)
        return keys

    def name(self, key: str) -> str:
        """Return the name of the key in the file, with its path."""
        return self.path + self.origins.get(key, key)

    def has(self, key: str) -> bool:
        """Return whether the file has the key, and not as null."""
        return self.config.get(key) is not None

    def part(self, key: str) -> ConfigKeys:
        """Return the keys of an object inside; a missing object is empty."""
        value = self.config.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise self.wrong(key, value, "an object")
        return ConfigKeys(value or {}, f"{self.path}{key}.", self.readings)

    def text(self, key: str) -> str:
        """Return a name that must be in the file."""
        value = self.config.get(key)
        if not isinstance(value, str) or not value:
            raise self.wrong(key, value, "a name")
        self.took(key)
        return value

    def number(
        self,
        key: str | tuple[str, ...],
        default: int | None = None,
        least: int = 1,
        derived: int | None = None,
    ) -> int:
        """Return an integer from ``least`` on, by the first of a key's names that the file has.

        If the file leaves the key out, return ``default``, or without it the default of the
        configuration class. ``derived`` is the value if the class has none, and of a null.
        """
        names = (key,) if isinstance(key, str) else key
        name = next((candidate for candidate in names if self.has(candidate)), names[0])
        value = self.config.get(name)
        if value is None:
            self._check_older_names(name)
            if default is not None:
                value = default
            elif name not in self.config or derived is None:
                value = self.class_default(name)
            value = derived if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.wrong(name, value, f"an integer from {least} on")
        most = MAX_LAYERS if name == _LAYER_COUNT else MAX_NUMBER
        if value > most:
            raise self.wrong(name, value, f"an integer of at most {most}")
        self.took(name) if self.has(name) else self.assumed(name, value)
        return value

    def class_default(self, key: str) -> Any:
        """Return the default of a key in the configuration class; None if the class has none."""
        if self.model_type in _VLLM_CLASSES:
            return _VLLM_CLASSES[self.model_type].get(key)
        config_class = self._class(key)
        names = {} if config_class is None else config_class.attribute_map
        value = getattr(config_class, names.get(key, key), None)
        return None if isinstance(value, property) else value

    def _class(self, key: str) -> Any:
        if not self.model_type or self.model_type in _VLLM_CLASSES:
            return None
        try:
            return configuration_class(self.model_type)
        except ImportError:
            raise LayoutFormError(
                f"config: {self.name(key)!r} is missing: add it, or install restow[engine], whose "
                f"transformers has the defaults of model_type {self.model_type!r}",
                key=self.name(key),
            ) from None

    def dtype(self, key: str, default: DType, unless_named: DType | None = None) -> DType:
        """Return a dtype: ``default`` for "auto", ``unless_named`` or ``default`` for a null."""
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

    def layer_kinds(self, count: int | None = None, **numbers: object) -> list[str]:
        """Return the kinds of ``count`` layers: as the file lists them, or else its class.

        The class makes its list from ``numbers``, which must have been checked.
        """
        count = self.number(_LAYER_COUNT) if count is None else count
        listed = self.listed_kinds(count)
        if listed is not None:
            return listed
        key = "layer_types"
        names = _class_list(self._class(key), num_hidden_layers=count, **numbers)
        if names is None:
            raise self.wrong(key, None, "a list of layer types")
        self.assumed(key, names)
        return self.as_many(key, self._known_kinds(key, names), count)

    def listed_kinds(self, count: int) -> list[str] | None:
        """Return the kinds of ``count`` layers if the file lists them, else None."""
        key = next((k for k in _LISTS if self.has(k)), None)
        return None if key is None else self.as_many(key, self.kinds(key), count)

    def kinds(self, key: str) -> list[str]:
        """Return the kinds of all layers, from a list of names or a pattern of letters."""
        names = self.config[key]
        if not isinstance(names, list | tuple | str):
            raise self.wrong(key, names, "a list of layer types")
        self.took(key)
        return self._known_kinds(key, names)

    def _known_kinds(self, key: str, names: Any) -> list[str]:
        for index, name in enumerate(names):
            if not isinstance(name, str) or name not in _KINDS:
                known = ", ".join(_KINDS)
                problem = f"[{index}]: layer type {name!r:.60} is unknown; known are {known}"
                raise self.fault(key, problem)
        return [_KINDS[name] for name in names]

    def as_many(self, key: str, kinds: list[str], count: int) -> list[str]:
        """Return the kinds of ``count`` layers from a list that draft layers may follow."""
        drafts = next((k for k in _DRAFT_LAYERS if self.has(k)), None)
        if drafts and len(kinds) == count + self.number(drafts, least=0):
            kinds = kinds[:count]
        if len(kinds) != count:
            raise self.fault(key, f" lists {len(kinds)} layers, {_LAYER_COUNT} says {count}")
        return kinds

    def sequence(self, key: str, count: int, allowed: tuple[object, ...] = ()) -> list[Any]:
        """Return a list with an entry for each layer, of ``allowed`` values if any are given."""
        listed = self.config.get(key)
        if (
            not isinstance(listed, list | tuple)
            or len(listed) != count
            or (
                allowed and any(type(i) is not type(allowed[0]) or i not in allowed for i in listed)
            )
        ):
            values = f", each {' or '.join(map(str, allowed))}" if allowed else ""
            raise self.wrong(key, listed, f"a list of {count} layers ({_LAYER_COUNT}){values}")
        self.took(key)
        return list(listed)

    def indices(self, key: str, within: range) -> list[int]:
        """Return a list of different layer numbers; empty if it is missing."""
        listed = self.config.get(key)
        if listed is None:
            return []
        if not isinstance(listed, list | tuple) or not all(type(i) is int for i in listed):
            raise self.wrong(key, listed, "a list of layer numbers")
        wrong_numbers = [i for i in listed if i not in within]
        if wrong_numbers:
            raise self.wrong(key, wrong_numbers, f"from {within.start} to {within.stop - 1}")
        if len(set(listed)) != len(listed):
            raise self.wrong(key, listed, "a list of different layers")
        self.took(key)
        return list(listed)

    def kv_heads(self) -> int:
        """Return the number of heads with keys; a null means all heads."""
        key, all_heads = "num_key_value_heads", "num_attention_heads"
        if self.has(key) and all_heads not in self.config:
            return self.number(key)
        heads = self.number(all_heads)
        count = self.number(key, derived=heads)
        if heads % count:
            raise self.wrong(key, count, f"a divisor of {all_heads}, {heads}")
        return count

    def head_dim(self) -> int:
        """Return the size of an attention head: the named size, or its share of the hidden size."""
        if self.has("head_dim"):
            return self.number("head_dim")
        return self.share("num_attention_heads", self.number("hidden_size"), "hidden_size")

    def share(self, key: str, whole: int, noun: str) -> int:
        """Return ``whole`` divided by the number that ``key`` says."""
        count = self.number(key)
        if whole % count:
            raise self.wrong(key, count, f"a divisor of {noun}, {whole}")
        return whole // count

    def took(self, key: str, note: str = "") -> None:
        """Note that the file's value of the key was taken."""
        self.readings.add(Reading(self.name(key), self.config.get(key), CONFIG, note))

    def assumed(self, key: str, value: object, note: str = _CLASS_DEFAULT) -> None:
        """Note that a value was assumed, since the file has none."""
        self.readings.add(Reading(self.name(key), value, "", note))

    def leave_out_drafts(self) -> None:
        """Note that draft layers (MTP) are left out, if the config has any."""
        for key in _DRAFT_LAYERS:
            if self.has(key) and self.number(key, least=0):
                self.took(key, "left out: draft layers run only on request (else: --draft-layers)")

    def fault(self, key: str, problem: str) -> LayoutFormError:
        """Return the error about a key; ``problem`` follows its name."""
        return LayoutFormError(f"config: {self.name(key)}{problem}", key=self.name(key))

    def wrong(self, key: str, value: object, wanted: str) -> LayoutFormError:
        """Return the error about a key that is missing, or whose value is not ``wanted``."""
        if value is None and key in self.config:
            return self.fault(key, f": null is not {wanted}")
        if value is None:
            name = self.name(key)
            return LayoutFormError(f"config: {name!r} is missing", key=name)
        return self.fault(key, f": {value!r:.60} is not {wanted}")

    def _check_older_names(self, key: str) -> None:
        """Refuse a config that has the number under a name which this model type does not have."""
        for old in _OLDER_NAMES.get(key, ()):
            if self.has(old):
                raise self.fault(
                    old,
                    f": {self.config[old]!r:.60}: the configuration class of this model type has "
                    f"it as {key!r}: this is an older form, or another model's",
                )
