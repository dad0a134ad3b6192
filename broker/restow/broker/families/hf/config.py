"""`model_from_hf_config` finds a model's state by its Hugging Face ``config.json``.

A config may leave defaults out, so the same ones are applied as in the model's configuration class
(transformers 5.x). transformers itself is not needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from restow.broker.errors import LayoutFormError, UnknownModelError
from restow.broker.families.hf.keys import FLOATS, Keys
from restow.broker.families.hf.models import MODELS, typed
from restow.broker.families.hf.quantization import kv_type
from restow.broker.families.hf.types import Types
from restow.broker.families.scales import Scales
from restow.broker.families.specs import ModelSpec
from restow.broker.layout import DType
from restow.broker.words import member


def model_from_hf_config(
    config: Mapping[str, Any],
    kv_dtype: DType | None = None,
    conv_dtype: DType | None = None,
    ssm_dtype: DType | None = None,
    kv_scales: Scales | None = None,
) -> ModelSpec:
    """Return the state of the model that ``config`` describes, by the name of its ``model_type``.

    Types that are not given follow the model's: KV and conv states have its ``dtype`` (bfloat16
    where it names none), recurrent states that of the conv states, except that Nemotron-H names
    its own and Kimi-Linear's are float32. A checkpoint that declares a float8 KV cache has one,
    with static scales that ``kv_scales`` has to tell apart, because no config holds them. Raises
    `UnknownModelError`, and `LayoutFormError` that names the key at fault.
    """
    kv_dtype, conv_dtype, ssm_dtype = (
        None if given is None else member(DType, given, name)
        for name, given in (
            ("kv_dtype", kv_dtype),
            ("conv_dtype", conv_dtype),
            ("ssm_dtype", ssm_dtype),
        )
    )
    keys = typed(Keys(config))
    model_type = keys.text("model_type")
    make = MODELS.get(model_type)
    if make is None:
        raise UnknownModelError(
            f"model_type {model_type!r} is unknown; known are {', '.join(sorted(MODELS))}",
            model_type=model_type,
        )
    dtype = keys.dtype("dtype", keys.dtype("torch_dtype", DType.BFLOAT16))
    for name, state in (("conv_dtype", conv_dtype), ("ssm_dtype", ssm_dtype)):
        if state is not None and not state.castable:
            raise LayoutFormError(f"{name}: recurrent states are never {state.label}: {FLOATS}")
    kv, scales = kv_type(keys, dtype, kv_dtype, kv_scales)
    layers = make(keys, Types(kv, conv_dtype or dtype, ssm_dtype, scales, dtype))
    flat = tuple(spec for specs in layers for spec in specs)
    numbers = 1 + max(spec.layer for spec in flat) if flat else 0
    per_layer = max(1, -(-numbers // len(layers)))
    return ModelSpec(model_type, flat, layer_count=len(layers), numbers_per_layer=per_layer)
