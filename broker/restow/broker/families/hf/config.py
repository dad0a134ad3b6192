"""Read a model's state from its Hugging Face ``config.json``: `model_from_hf_config`.

The language model may stand in a part of the config, beside vision or audio (`WrappedModel`). Draft
layers (MTP) repeat one of its layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from restow.broker.errors import LayoutFormError, UnknownModelError
from restow.broker.families.hf import attention, hybrids, latent
from restow.broker.families.hf.attention import ModelTable, Reader
from restow.broker.families.hf.keys import FLOATS, ConfigKeys, Readings
from restow.broker.families.hf.kv_types import KvTypes, Quantisation, Types, quantisation_of
from restow.broker.families.specs import AttentionSpec, LayerSpec, MlaSpec, ModelSpec, Scales
from restow.broker.layout import DType
from restow.broker.layout.values import MAX_WORD_LENGTH
from restow.broker.words import member

MODELS: ModelTable = {**attention.MODELS, **latent.MODELS, **hybrids.MODELS}
"""Readers of language models by ``model_type``."""

_TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")
"""Parts in which vLLM and its configuration classes find the language model
(`get_hf_text_config`); the last has a ``text_config`` of its own."""
_OTHER_PARTS = ("vision_config", "audio_config", "vit_config", "encoder_config")
_MAX_DEPTH = 3
_BY_ARCHITECTURE = {
    "LongcatFlashForCausalLM": "longcat_flash",
    "LongcatFlashNgramForCausalLM": "longcat_flash",
}
"""Checkpoints whose config names only an architecture (vLLM `_ARCHITECTURE_TO_MODEL_TYPE`)."""
_NO_FLOAT16 = ("gemma2", "gemma3", "gemma3_text", "glm4")
"""Types that overflow in float16 (vLLM `_FLOAT16_NOT_SUPPORTED_MODELS`)."""
MTP = "mtp"
"""The draft of draft layers whose weights are in the model's own checkpoint."""
_NEXTN, _MTP_COUNT = "num_nextn_predict_layers", "mtp_num_hidden_layers"
_DRAFTS: dict[str, tuple[str, int]] = {
    "deepseek_v3": (_NEXTN, 0),
    "glm4_moe": (_NEXTN, 0),
    "glm4_moe_lite": (_NEXTN, 0),
    "mimo": (_NEXTN, 0),
    "qwen3_5_moe_text": (_MTP_COUNT, 1),
    "qwen3_5_text": (_MTP_COUNT, 1),
    "qwen3_next": (_NEXTN, 1),
}
"""The key that counts draft layers, and the number that vLLM assumes if it is missing."""


@dataclass(frozen=True, slots=True)
class WrappedModel:
    """A type of models whose language model stands in a part of the config.

    The part is of type ``text``, or of another known type that it names. If ``fixed``, the whole's
    configuration class reads the part as ``text`` whatever type it names. If ``alone``, vLLM runs
    no other type there, and the class also reads the types ``as_well`` as ``text``. ``name`` is
    the part's name then, if not ``text``. ``architecture`` is the architecture of the language
    model, if several share a type. Some configs have the part's keys beside the others (``flat``).
    """

    text: str
    as_well: tuple[str, ...] = ()
    alone: bool = False
    flat: bool = False
    name: str = ""
    fixed: bool = False
    architecture: str = ""

    def types(self, keys: ConfigKeys) -> tuple[str, str]:
        """Return the name of the part with these keys, and the type to read it as.

        Raises `LayoutFormError` if there is no part, or a part of a type that vLLM does not run.
        """
        part_type = self.text
        if not keys.path:
            if not self.flat or not keys.has("num_hidden_layers"):
                raise keys.wrong("text_config", None, "the config of a language model")
        elif keys.has("model_type"):
            part_type = keys.text("model_type")
        else:
            keys.assumed("model_type", self.text)
        if self.fixed:
            return self.name or part_type, self.text
        if not self.alone:
            return part_type, part_type
        if part_type not in (self.text, *self.as_well):
            known = ", ".join((self.text, *self.as_well))
            raise keys.wrong("model_type", part_type, f"one of {known}")
        return self.name or self.text, self.text


_FIXED = (
    *("ernie4_5_vl_moe", "gemma3", "gemma3n", "gemma4", "gemma4_unified", "glm4v", "glm4v_moe"),
    *("glm_ocr", "llama4", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "aria"),
)
WHOLES: dict[str, WrappedModel] = {
    **{name: WrappedModel(f"{name}_text", fixed=True) for name in _FIXED},
    **{
        name: WrappedModel(f"{name}_text", flat=True, fixed=True)
        for name in ("paddleocr_vl", "qwen2_5_vl", "qwen2_vl")
    },
    **{
        name: WrappedModel(f"{name}_text", name=f"{name}_text", fixed=True)
        for name in ("qwen2_5_omni", "qwen3_omni_moe")
    },
    **{name: WrappedModel("llama") for name in ("idefics3", "llava", "llava_next", "smolvlm")},
    **{
        name: WrappedModel("qwen3_5_text") for name in ("minicpm_ocr", "minicpmv4_6", "minicpmv4_7")
    },
    **{name: WrappedModel("qwen2") for name in ("internvl", "internvl_chat")},
    "bailing_moe_v3_vl": WrappedModel(
        "bailing_hybrid", name="bailing_hybrid", fixed=True, architecture=hybrids.LING_3
    ),
    "cohere2_vision": WrappedModel("cohere2"),
    "deepseek_vl_v2": WrappedModel("deepseek_v2", ("deepseek_vl_v2",), alone=True),
    "exaone4_5": WrappedModel("exaone4"),
    "kimi_k25": WrappedModel("deepseek_v3", ("kimi_k2",), alone=True),
    "kimi_k3": WrappedModel("kimi_linear", fixed=True),
    "kimi_vl": WrappedModel("deepseek_v2", ("deepseek_v3",), alone=True),
    "lfm2_vl": WrappedModel("lfm2"),
    "mistral3": WrappedModel("mistral"),
    "NemotronH_Nano_VL_V2": WrappedModel("nemotron_h"),
    "paligemma": WrappedModel("gemma"),
    "qwen3_asr": WrappedModel("qwen3"),
    "step3_vl": WrappedModel("step3_text", alone=True),
    "step3p7": WrappedModel("step3p7_text", ("step3p5",), alone=True, name="step3p5"),
}
"""Models with a language model among their parts, by ``model_type``."""


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
    looking: bool = False,
) -> ModelSpec:
    """Return the state of the model that ``config`` describes, by its ``model_type``.

    For a model with vision or audio this is the state of its text part, as for vLLM's connector.
    ``dtype`` is the type in which the engine computes. Without it vLLM's ``auto`` is assumed: the
    config's type, or bfloat16 if that is float32 or missing. States whose type is not given have
    this type, except that Nemotron-H names its own recurrent type and Kimi-Linear's is float32.

    A checkpoint may declare a float8 KV cache in the config or in ``quant_config``, the contents of
    ``hf_quant_config.json``. Its static scales are in no config, so that ``kv_scales`` or the
    ``revision`` must identify them. If neither does, the model of a layout for ``looking`` at has
    unknown scales, with which no broker takes an engine; otherwise it is refused. ``draft_layers``
    counts the draft layers (MTP) that the engine runs. What was read and what was assumed is added
    to ``readings``.

    Raises `UnknownModelError`, and `LayoutFormError` that names the key at fault, also for a key
    that is missing while transformers, which has the defaults, is not installed.
    """
    kv_dtype, conv_dtype, ssm_dtype, dtype = (
        None if chosen is None else member(DType, chosen, name)
        for name, chosen in (
            ("kv_dtype", kv_dtype),
            ("conv_dtype", conv_dtype),
            ("ssm_dtype", ssm_dtype),
            ("dtype", dtype),
        )
    )
    for name, state in (("conv_dtype", conv_dtype), ("ssm_dtype", ssm_dtype), ("dtype", dtype)):
        if state is not None and not state.castable:
            raise LayoutFormError(f"{name}: recurrent states are never {state.label}: {FLOATS}")
    whole = _typed(ConfigKeys(config, readings=Readings() if readings is None else readings))
    model_type, read, text = _reader(whole, _text_part(whole))
    quantisation = quantisation_of(whole, text, quant_config, looking)
    computed = dtype or _computed(whole, text)
    kv = KvTypes(computed, kv_dtype, kv_scales, quantisation, whole.readings, revision, looking)
    if kv_dtype is not None or kv_scales is not None:
        kv.chosen()  # refuses a contradiction, also of a model without attention
    layers = read(text, Types(kv, conv_dtype or computed, ssm_dtype, computed))
    flat = tuple(spec for specs in layers for spec in specs)
    numbers = max((1 + spec.layer for spec in flat), default=1)
    per_layer = -(-numbers // (len(layers) or 1))
    drafts: tuple[LayerSpec, ...] = ()
    if draft_layers:
        drafts = _drafted(text, model_type, flat, len(layers) * per_layer, draft_layers)
    else:
        text.leave_out_drafts()
    return ModelSpec(
        model_type,
        flat,
        layer_count=len(layers),
        quantisation=_method(quantisation),
        numbers_per_layer=per_layer,
        draft_layers=drafts,
        draft=MTP if drafts else "",
        revision=revision,
    )


def _typed(keys: ConfigKeys) -> ConfigKeys:
    """Return the config with the ``model_type`` that vLLM gives it, if it has none.

    vLLM gives a type to the architectures of `_BY_ARCHITECTURE`, and to Mistral's own
    ``params.json`` of a model with latents (Mistral Large 3), which it serves as a DeepSeek-V3.
    """
    if keys.has("model_type"):
        return keys
    names = keys.config.get("architectures")
    for name in names if isinstance(names, list | tuple) else ():
        if name in _BY_ARCHITECTURE:
            return keys.put("model_type", _BY_ARCHITECTURE[name], "architectures")
    if keys.has("n_layers") and keys.has("kv_lora_rank"):
        renamed = keys.put("num_hidden_layers", keys.number("n_layers"), "n_layers")
        renamed.assumed("model_type", "deepseek_v3", "Mistral's own form of a model with latents")
        return renamed.put("model_type", "deepseek_v3")
    return keys


def _text_part(keys: ConfigKeys) -> ConfigKeys:
    """Return the keys of the language model: the same keys if the config has no parts.

    Raises `LayoutFormError` if the config has parts, but no part is a language model.
    """
    for _ in range(_MAX_DEPTH):
        parts = [part for part in _TEXT_PARTS if keys.has(part)]
        if not parts:
            break
        first = keys.config[parts[0]]
        for name in parts[1:]:
            if keys.config[name] != first:
                raise LayoutFormError(
                    f"config: {keys.path}{parts[0]} and {keys.path}{name} are two language models: "
                    f"remove the part that the engine does not serve",
                    key=keys.path + name,
                )
        if first == {}:
            raise keys.wrong(parts[0], first, "the config of a language model")
        keys = keys.part(parts[0])
    else:
        problem = f"config: {keys.path[:-1]}: parts are nested too deeply"
        raise LayoutFormError(problem, key=keys.path)
    others = [name for name in _OTHER_PARTS if keys.has(name)]
    if others and not keys.has("num_hidden_layers") and not keys.has("num_layers"):
        raise LayoutFormError(
            f"config: {keys.path}{others[0]} is there, and no part of a language model: none of "
            f"{', '.join(_TEXT_PARTS)}",
            key=keys.path + others[0],
        )
    return keys


def _reader(whole: ConfigKeys, text: ConfigKeys) -> tuple[str, Reader, ConfigKeys]:
    """Return the language model's name, its reader, and the keys to read.

    The text part may have a type of its own, or none; a type of `WHOLES` overrides it.
    """
    names = [keys.text("model_type") for keys in (text, whole) if keys.has("model_type")]
    outer = names[-1] if names else whole.text("model_type")
    if outer in WHOLES:
        name, read_as = WHOLES[outer].types(text)
        if WHOLES[outer].architecture:
            text = text.put("architectures", [WHOLES[outer].architecture])
    else:
        name, read_as = (
            names[0],
            next((candidate for candidate in names if candidate in MODELS), ""),
        )
    if read_as in MODELS:
        return name, MODELS[read_as], replace(text, model_type=read_as)
    inside = "" if text is whole else f" (in a {outer!r})"
    raise UnknownModelError(
        f"{text.path}model_type {name!r}{inside} is unknown; known are "
        f"{', '.join(sorted({*MODELS, *WHOLES}))}",
        model_type=name,
    )


def _drafted(
    keys: ConfigKeys, model_type: str, own: Sequence[LayerSpec], first: int, count: int
) -> tuple[LayerSpec, ...]:
    """Return the state of ``count`` draft layers, numbered from ``first`` on.

    A draft layer is like the model's own layers with full attention (vLLM 0.32 `deepseek_mtp.py`,
    `glm4_moe_mtp.py`, `glm4_moe_lite_mtp.py`, `mimo_mtp.py`, `qwen3_next_mtp.py`,
    `qwen3_5_mtp.py`). Raises `LayoutFormError` for more layers than the config has, and for a type
    whose draft layers are not known.
    """
    if model_type not in _DRAFTS:
        raise LayoutFormError(
            f"draft layers of a {model_type!r}: what they keep is not known; it is known of "
            f"{', '.join(sorted(_DRAFTS))}",
            model_type=model_type,
        )
    key, default = _DRAFTS[model_type]
    declared = keys.number(key, default, least=0)
    if count > declared:
        raise keys.wrong(key, declared, f"as many draft layers as are asked for, {count}")
    full = [
        spec
        for spec in own
        if isinstance(spec, MlaSpec) or (isinstance(spec, AttentionSpec) and not spec.window_tokens)
    ]
    if not full:
        raise LayoutFormError(f"draft layers of a {model_type!r} without any full attention")
    return tuple(replace(full[-1], layer=first + index) for index in range(count))


def _computed(whole: ConfigKeys, text: ConfigKeys) -> DType:
    """Return the type in which vLLM computes by ``--dtype auto`` (`_resolve_auto_dtype`, 0.32)."""
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


def _method(quantisation: Quantisation) -> str:
    """Return the method by which the weights are quantised, as far as vLLM knows it."""
    try:
        return quantisation.method
    except LayoutFormError:
        return str(quantisation.config.get("quant_method") or "")[:MAX_WORD_LENGTH]
