"""`kv_type` finds type and scales of keys and values, by what was asked and what is declared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from restow.broker.errors import LayoutFormError
from restow.broker.families.hf.keys import Keys
from restow.broker.families.scales import NO_SCALES, QUANTISED, ScaleKind, Scales
from restow.broker.layout import DType

_NAME_THEM = (
    "name the static scales by what is equal on P and D exactly when they are, such as the "
    "checkpoint's revision (--kv-scales static --kv-scales-fingerprint TEXT)"
)


def kv_type(
    keys: Keys, model: DType, asked: DType | None, scales: Scales | None
) -> tuple[DType, Scales]:
    """Return the type and the scales of keys and values, as vLLM would choose them.

    Without ``asked`` the checkpoint's own type holds, else the model's. Which static scales there
    are no config says: so `LayoutFormError` where ``scales`` would have to be guessed.
    """
    declared = _declared_type(keys, guess=asked is None)
    dtype = asked or declared or model
    if dtype not in QUANTISED:
        if not dtype.castable:
            raise LayoutFormError(
                f"KV of type {dtype.label} does not say what its bytes are: name the type of the "
                f"elements, such as float8_e4m3fn"
            )
        scales = scales or NO_SCALES
    elif scales is None:
        scales = _default(keys, dtype, declared)
    scales.check(dtype)
    if dtype is DType.INT8 and scales.kind is ScaleKind.NONE:
        raise LayoutFormError("KV of type int8 has scales; say which (--kv-scales)")
    return dtype, scales


def _default(keys: Keys, dtype: DType, declared: DType | None) -> Scales:
    """Return no scales where there can be none. Raises `LayoutFormError`."""
    if dtype is DType.INT8:
        return NO_SCALES
    if declared is not None:
        raise LayoutFormError(
            f"config: quantization_config declares a KV cache of {declared.label} with static "
            f"scales: {_NAME_THEM}, or give KV another type (--kv-dtype)",
            key="quantization_config",
        )
    if _quantization(keys):
        raise LayoutFormError(
            f"config: the checkpoint is quantised (quantization_config), so it may hold scales of "
            f"KV that the config does not mention: {_NAME_THEM}, or say that there are none "
            f"(--kv-scales none)",
            key="quantization_config",
        )
    return NO_SCALES


def _declared_type(keys: Keys, guess: bool) -> DType | None:
    """Return the type of KV that the checkpoint declares; None where it declares none.

    ``kv_cache_scheme`` (compressed-tensors, newer modelopt) or ``kv_cache_quant_algo`` (modelopt),
    as vLLM reads them (`utils/torch_utils.py`, `get_kv_cache_quant_algo_string`). Of a scheme that
    no family describes: `LayoutFormError` if the type is to be taken from it (``guess``).
    """
    config = _quantization(keys)
    inner = config.get("quantization")
    for one in (inner, config) if isinstance(inner, Mapping) else (config,):
        for key in ("kv_cache_scheme", "kv_cache_quant_algo"):
            scheme = one.get(key)
            if not scheme:
                continue
            if _is_float8(scheme):
                return DType.FLOAT8_E4M3FN
            if guess:
                raise LayoutFormError(
                    f"config: quantization_config.{key}: {scheme!r:.60} is no KV cache that a "
                    f"family describes (static float8 is): name its type (--kv-dtype)",
                    key=key,
                )
    return None


def _is_float8(scheme: object) -> bool:
    if isinstance(scheme, Mapping):
        form = (scheme.get("type"), scheme.get("num_bits"), bool(scheme.get("dynamic")))
        return form == ("float", 8, False)
    return isinstance(scheme, str) and scheme.lower() == "fp8"


def _quantization(keys: Keys) -> Mapping[str, Any]:
    """Return the config's quantisation, which multimodal models may have beside their text's."""
    for config in (keys.config, keys.config.get("text_config")):
        found = config.get("quantization_config") if isinstance(config, Mapping) else None
        if isinstance(found, Mapping) and found:
            return found
    return {}
