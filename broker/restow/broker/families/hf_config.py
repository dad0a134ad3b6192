"""From a model's Hugging Face ``config.json`` to its state.

A config may leave defaults out, so the same ones are applied as in the model's configuration class
(transformers 5.x). transformers itself is not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from restow.broker.errors import LayoutFormError, UnknownModelError
from restow.broker.families.specs import AttentionSpec, LayerSpec, Mamba2Spec, ModelSpec
from restow.broker.layout import DType

_KINDS = {
    "M": "mamba",
    "mamba": "mamba",
    "linear_attention": "mamba",
    "*": "attention",
    "attention": "attention",
    "full_attention": "attention",
    "-": "none",
    "mlp": "none",
    "E": "none",
    "moe": "none",
    "hybrid": "both",
}
"""What a layer's name, or its letter in a pattern, says about its state."""


def model_from_hf_config(
    config: Mapping[str, Any],
    kv_dtype: DType | None = None,
    conv_dtype: DType | None = None,
    ssm_dtype: DType | None = None,
) -> ModelSpec:
    """The state of the model that ``config`` describes, by the name of its ``model_type``.

    Types that are not given follow the model's: KV and conv states have its ``dtype`` (bfloat16
    where it names none), SSM states that of the conv states, except that Nemotron-H names its own.
    Raises `UnknownModelError`, and `LayoutFormError` that names the key at fault.
    """
    keys = _Keys(config)
    model_type = keys.text("model_type")
    family = _FAMILIES.get(model_type)
    if family is None:
        raise UnknownModelError(
            f"model_type {model_type!r} is unknown; known are {', '.join(sorted(_FAMILIES))}",
            model_type=model_type,
        )
    dtype = keys.dtype("dtype", keys.dtype("torch_dtype", DType.BFLOAT16))
    conv = conv_dtype or dtype
    form = family(keys)
    ssm = ssm_dtype or keys.dtype(form.ssm_dtype_key, conv, form.ssm_dtype)
    layers: list[LayerSpec] = []
    for index, kind in enumerate(form.kinds):
        if kind in ("attention", "both"):
            layers.append(AttentionSpec(index, form.kv_heads, form.head_dim, kv_dtype or dtype))
        if kind in ("mamba", "both"):
            layers.append(
                Mamba2Spec(
                    index,
                    form.mamba_heads,
                    form.mamba_head_dim,
                    form.mamba_state,
                    form.mamba_groups,
                    form.conv_kernel,
                    conv,
                    ssm,
                )
            )
    return ModelSpec(model_type, tuple(layers))


@dataclass(frozen=True, slots=True)
class _Form:
    """The numbers of a model, whatever its family calls them."""

    kinds: list[str]
    kv_heads: int
    head_dim: int
    mamba_heads: int
    mamba_head_dim: int
    mamba_state: int
    mamba_groups: int
    conv_kernel: int
    ssm_dtype_key: str = ""
    ssm_dtype: DType | None = None


@dataclass(frozen=True, slots=True)
class _Keys:
    """A config's keys, read with their defaults; a null is as good as nothing."""

    config: Mapping[str, Any]

    def __post_init__(self) -> None:
        if not isinstance(self.config, Mapping):
            raise LayoutFormError(f"config: expected an object, got {type(self.config).__name__}")

    def has(self, key: str) -> bool:
        return self.config.get(key) is not None

    def text(self, key: str) -> str:
        value = self.config.get(key)
        if not isinstance(value, str) or not value:
            raise _wrong(key, value, "a name")
        return value

    def number(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self.config.get(key)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise _wrong(key, value, f"an integer from {least} on")
        return value

    def dtype(self, key: str, default: DType, unless_named: DType | None = None) -> DType:
        """A dtype; ``default`` for "auto", and for nothing, unless the family has its own."""
        value = self.config.get(key)
        if value is None:
            return unless_named or default
        if value == "auto":
            return default
        try:
            return DType.parse(str(value).removeprefix("torch."))
        except LayoutFormError as error:
            raise LayoutFormError(f"config: {key}: {error.message}", key=key) from None

    def kinds(self, key: str) -> list[str]:
        """The kinds of all layers, from a list of names or a pattern of letters."""
        names = self.config[key]
        if not isinstance(names, list | tuple | str):
            raise _wrong(key, names, "a list of layer types")
        for index, name in enumerate(names):
            if not isinstance(name, str) or name not in _KINDS:
                known = ", ".join(_KINDS)
                raise LayoutFormError(
                    f"config: {key}[{index}]: layer type {name!r} is unknown; known are {known}",
                    key=key,
                )
        return [_KINDS[name] for name in names]

    def listed_kinds(self) -> list[str] | None:
        """The kinds of all layers where the config lists them."""
        key = next((k for k in ("layers_block_type", "layer_types") if self.has(k)), None)
        if key is None:
            return None
        kinds, count = self.kinds(key), self.number("num_hidden_layers", 32)
        if len(kinds) != count:
            raise LayoutFormError(
                f"config: {key} lists {len(kinds)} layers, num_hidden_layers says {count}", key=key
            )
        return kinds

    def kv_heads(self, default: int | None) -> int:
        """Without grouped queries each head has its own keys."""
        if not self.has("num_key_value_heads") and (default is None or self._null_kv_heads()):
            return self.number("num_attention_heads", 32)
        return self.number("num_key_value_heads", default)

    def _null_kv_heads(self) -> bool:
        return "num_key_value_heads" in self.config

    def head_dim(self) -> int:
        """An attention head's share of the hidden size, unless it has a size of its own."""
        if self.has("head_dim"):
            return self.number("head_dim")
        return self.number("hidden_size", 4096) // self.number("num_attention_heads", 32)

    def mamba_head_dim(self, channels: int, heads: int) -> int:
        """``mamba_d_head``, which "auto" leaves to the number of channels."""
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


def _wrong(key: str, value: object, wanted: str) -> LayoutFormError:
    what = f"{key!r} is missing" if value is None else f"{key}: {value!r:.60} is not {wanted}"
    return LayoutFormError(f"config: {what}", key=key)


def _nemotron_h(keys: _Keys) -> _Form:
    """Each layer is one of Mamba2, attention, MLP, experts: a pattern of letters, or a list."""
    key = next(
        (k for k in ("layers_block_type", "layer_types", "hybrid_override_pattern") if keys.has(k)),
        None,
    )
    if key is not None:
        kinds = keys.kinds(key)
    elif keys.number("num_hidden_layers", 4) == 4:
        kinds = ["mamba", "none", "attention", "none"]  # the configuration class's default
    else:
        raise LayoutFormError(
            "config: 'hybrid_override_pattern' or 'layers_block_type' is missing",
            key="hybrid_override_pattern",
        )
    return _Form(
        kinds,
        kv_heads=keys.kv_heads(8),
        head_dim=keys.number("head_dim", keys.number("attention_head_dim", 128)),
        mamba_heads=keys.number("mamba_num_heads", 128),
        mamba_head_dim=keys.number("mamba_head_dim", 64),
        mamba_state=keys.number("ssm_state_size", 128),
        mamba_groups=keys.number("mamba_n_groups", keys.number("n_groups", 8)),
        conv_kernel=keys.number("mamba_d_conv", keys.number("conv_kernel", 4, least=2), least=2),
        ssm_dtype_key="mamba_ssm_cache_dtype",
        ssm_dtype=DType.FLOAT32,
    )


def _granite(keys: _Keys) -> _Form:
    """Granite 4: Mamba2 layers with attention layers among them."""
    kinds = keys.listed_kinds() or ["mamba"] * keys.number("num_hidden_layers", 32)
    return _mamba_names(keys, kinds, keys.kv_heads(None), _channels(keys))


def _bamba(keys: _Keys) -> _Form:
    """Bamba: as Granite, with the attention layers listed by number."""
    listed = keys.config.get("attn_layer_indices") or []
    if not isinstance(listed, list | tuple) or not all(isinstance(i, int) for i in listed):
        raise _wrong("attn_layer_indices", listed, "a list of layer numbers")
    count = keys.number("num_hidden_layers", 32)
    kinds = keys.listed_kinds() or ["attention" if i in listed else "mamba" for i in range(count)]
    return _mamba_names(keys, kinds, keys.kv_heads(8), _channels(keys))


def _falcon_h1(keys: _Keys) -> _Form:
    """Falcon-H1: attention and Mamba2 side by side in every layer."""
    kinds = ["both"] * keys.number("num_hidden_layers", 32)
    unsized = "mamba_d_ssm" in keys.config and not keys.has("mamba_d_ssm")
    channels = _channels(keys) if unsized else keys.number("mamba_d_ssm", 1024)
    return _mamba_names(keys, kinds, keys.kv_heads(8), channels)


def _channels(keys: _Keys) -> int:
    return keys.number("mamba_expand", 2) * keys.number("hidden_size", 4096)


def _mamba_names(keys: _Keys, kinds: list[str], kv_heads: int, channels: int) -> _Form:
    """The names that Bamba, Granite and Falcon-H1 share."""
    heads = keys.number("mamba_n_heads", 128)
    return _Form(
        kinds,
        kv_heads=kv_heads,
        head_dim=keys.head_dim(),
        mamba_heads=heads,
        mamba_head_dim=keys.mamba_head_dim(channels, heads),
        mamba_state=keys.number("mamba_d_state", 256),
        mamba_groups=keys.number("mamba_n_groups", 1),
        conv_kernel=keys.number("mamba_d_conv", 4, least=2),
    )


_FAMILIES: dict[str, Callable[[_Keys], _Form]] = {
    "bamba": _bamba,
    "falcon_h1": _falcon_h1,
    "granitemoehybrid": _granite,
    "nemotron_h": _nemotron_h,
}
