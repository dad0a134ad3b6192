"""`model_from_hf_config` finds a model's state by its Hugging Face ``config.json``.

A config may leave defaults out, so the same ones are applied as in the model's configuration class
(transformers 5.x). transformers itself is not needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from restow.broker.errors import LayoutFormError, UnknownModelError
from restow.broker.families.hf.draft_layers import MTP, drafted
from restow.broker.families.hf.keys import FLOATS, Keys
from restow.broker.families.hf.kv_types import KvTypes
from restow.broker.families.hf.layers import Reader
from restow.broker.families.hf.models import MODELS, WHOLES, typed
from restow.broker.families.hf.nested import text_part
from restow.broker.families.hf.quantization import Quantisation, quantisation_of
from restow.broker.families.hf.readings import Readings
from restow.broker.families.hf.types import Types
from restow.broker.families.specs import LayerSpec, ModelSpec, Scales
from restow.broker.layout import DType
from restow.broker.layout.limits import MAX_WORD_LENGTH
from restow.broker.words import member

_NO_FLOAT16 = ("gemma2", "gemma3", "gemma3_text", "glm4")
"""Types that overflow in it (vLLM `_FLOAT16_NOT_SUPPORTED_MODELS`)."""


def model_from_hf_config(
    config: Mapping[str, Any],
    kv_dtype: DType | None = None,
    conv_dtype: DType | None = None,
    ssm_dtype: DType | None = None,
    kv_scales: Scales | None = None,
    *,
    dtype: DType | None = None,
    quant_config: Mapping[str, Any] | None = None,
    readings: Readings | None = None,
    draft_layers: int = 0,
    revision: str = "",
) -> ModelSpec:
    """Return the state of the model that ``config`` describes, by the name of its ``model_type``.

    Of a model with parts beside its text (vision, audio) that is the text part's, as for vLLM's
    connector. Types that are not given follow ``dtype``, what the engine computes in: without it
    what vLLM's ``auto`` would choose, so the config's, but bfloat16 where it names none or float32.
    KV and conv states have it, recurrent states that of the conv states, except that Nemotron-H
    names its own and Kimi-Linear's are float32. A checkpoint that declares a float8 KV cache, there
    or in ``quant_config`` (what ``hf_quant_config.json`` holds), has one as far as vLLM heeds that,
    with static scales that ``kv_scales`` or the ``revision`` has to tell apart, because no config
    holds them. The model's ``quantisation`` is the checkpoint's method. So many ``draft_layers``
    (MTP) are those of an engine that runs them. What was read and assumed is said to ``readings``.
    Raises `UnknownModelError`, and `LayoutFormError` that names the key at fault.
    """
    kv_dtype, conv_dtype, ssm_dtype, dtype = (
        None if given is None else member(DType, given, name)
        for name, given in (
            ("kv_dtype", kv_dtype),
            ("conv_dtype", conv_dtype),
            ("ssm_dtype", ssm_dtype),
            ("dtype", dtype),
        )
    )
    for name, state in (("conv_dtype", conv_dtype), ("ssm_dtype", ssm_dtype), ("dtype", dtype)):
        if state is not None and not state.castable:
            raise LayoutFormError(f"{name}: recurrent states are never {state.label}: {FLOATS}")
    whole = typed(Keys(config, readings=Readings() if readings is None else readings))
    text = text_part(whole)
    model_type, make, text = _reader(whole, text)
    found = quantisation_of(whole, text, quant_config)
    computed = dtype or _computed(whole, text)
    kv = KvTypes(computed, kv_dtype, kv_scales, found, whole.readings, revision)
    if kv_dtype is not None or kv_scales is not None:
        kv.attention()  # what is asked for makes sense, also of a model without attention
    layers = make(text, Types(kv, conv_dtype or computed, ssm_dtype, computed))
    flat = tuple(spec for specs in layers for spec in specs)
    numbers = max((1 + spec.layer for spec in flat), default=1)
    per_layer = -(-numbers // (len(layers) or 1))
    drafts: tuple[LayerSpec, ...] = ()
    if draft_layers:
        drafts = drafted(text, model_type, flat, len(layers) * per_layer, draft_layers)
    else:
        text.leave_out_drafts()
    return ModelSpec(
        model_type,
        flat,
        layer_count=len(layers),
        quantisation=_method(found),
        numbers_per_layer=per_layer,
        draft_layers=drafts,
        draft=MTP if drafts else "",
        revision=revision,
    )


def _reader(whole: Keys, text: Keys) -> tuple[str, Reader, Keys]:
    """Return the language model's type, what reads its config, and the keys to read.

    The text part may have a type of its own, or none; what the whole config names goes first.
    """
    names = [keys.text("model_type") for keys in (text, whole) if keys.has("model_type")]
    outer = names[-1] if names else whole.text("model_type")
    if outer in WHOLES:
        name, model_type = WHOLES[outer].types(text)
        names = [name, model_type]
        read = MODELS.get(model_type)
        if WHOLES[outer].architecture:
            text = text.put("architectures", [WHOLES[outer].architecture])
    else:
        read = next((MODELS[one] for one in names if one in MODELS), None)
    if read is not None:
        return names[0], read, text
    inside = "" if text is whole else f" (in a {outer!r})"
    raise UnknownModelError(
        f"{text.path}model_type {names[0]!r}{inside} is unknown; known are "
        f"{', '.join(sorted({*MODELS, *WHOLES}))}",
        model_type=names[0],
    )


def _computed(whole: Keys, text: Keys) -> DType:
    """Return the type that vLLM computes in by ``--dtype auto`` (`_resolve_auto_dtype`, 0.32)."""
    parts = [whole, text]
    parts += [whole.part(name) for name in ("vision_config", "encoder_config") if whole.has(name)]
    for keys in parts:
        key = next((k for k in ("dtype", "torch_dtype") if keys.has(k)), None)
        if key is None or keys.config[key] == "auto":
            continue
        named = keys.dtype(key, DType.BFLOAT16)
        lossy = named is DType.FLOAT16 and whole.config.get("model_type") in _NO_FLOAT16
        if named is DType.FLOAT32 or lossy:
            keys.took(key, "computed in bfloat16, as vLLM's auto does (else: --dtype)")
            return DType.BFLOAT16
        return named
    note = "no dtype is named: bfloat16, or what vLLM finds the weights to have (else: --dtype)"
    whole.assumed("dtype", DType.BFLOAT16.label, note)
    return DType.BFLOAT16


def _method(found: Quantisation) -> str:
    """Return how the weights are quantised, as far as vLLM knows of that."""
    try:
        return found.method
    except LayoutFormError:
        return str(found.config.get("quant_method") or "")[:MAX_WORD_LENGTH]
