"""The types of a model's states, and what a quantised checkpoint says of its KV cache.

`Quantisation` is what a checkpoint declares, and where. `KvTypes` finds the type and the scales of
keys and values from it and from the requested type, as vLLM 0.32 does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from restow.broker.errors import LayoutFormError
from restow.broker.families.hf.keys import CONFIG, QUANT_CONFIG, ConfigKeys, Reading, Readings
from restow.broker.families.recurrent import Mixer
from restow.broker.families.specs import (
    NO_SCALES,
    PACKED,
    QUANTISED,
    AttentionSpec,
    MlaSpec,
    ScaleKind,
    Scales,
)
from restow.broker.layout import DType
from restow.broker.layout.values import UNKNOWN_SCALES

KNOWN = (
    *("auto_awq", "auto_gptq", "awq", "awq_marlin", "compressed-tensors", "deepseek_v4_fp8"),
    *("experts_int8", "fbgemm_fp8", "fp8", "fp_quant", "gpt_oss_mxfp4", "gptq", "gptq_marlin"),
    *("humming", "inc", "modelopt", "modelopt_fp4", "modelopt_mixed", "modelopt_mxfp8"),
    *("moe_wna16", "mxfp4", "mxfp8", "quark", "torchao"),
    # Names that vLLM's `override_quantization_method` takes for one of these.
    *("auto-round", "intel/auto-round"),
)
"""Methods of checkpoints that vLLM 0.32 has (`layers/quantization/__init__.py`)."""
_MODELOPT_ALGOS = {
    "FP8": "modelopt",
    "FP8_PER_CHANNEL_PER_TOKEN": "modelopt",
    "FP8_PB_WO": "modelopt",
    "NVFP4": "modelopt_fp4",
    "MIXED_PRECISION": "modelopt_mixed",
}
"""Algorithms in ModelOpt's own files, with vLLM's names
(`ModelArchConfigConvertorBase._normalize_quantization_config`; the last since vLLM 0.33)."""
_MODELOPT_PARTS = {
    "FP4": "modelopt_fp4",
    "MXFP8": "modelopt_mxfp8",
    "MIXED_PRECISION": "modelopt_mixed",
}
"""Parts of an algorithm's name, by which vLLM's `override_quantization_method` takes ``modelopt``
for another method."""
_NAME_THEM = (
    "name the static scales by what is equal on P and D exactly when the scales are, such as the "
    "checkpoint's revision (--revision TEXT, or --kv-scales static --kv-scales-fingerprint TEXT)"
)
_DECLARING = ("kv_cache_scheme", "kv_cache_quant_algo")
_LEFT_ASIDE = "left aside, as vLLM 0.32 does: KV has the model's type"
_FP8 = "static float8, the only type that a family describes"


@dataclass(frozen=True, slots=True)
class Quantisation:
    """A checkpoint's declaration of how it is quantised; empty if it is not.

    ``place`` is the key of the declaration in ``file``. ``whole`` is False if only the text part
    declares it. ``trimmed``: it is ModelOpt's, and lacks the keys by which vLLM tells.
    """

    config: Mapping[str, Any]
    place: str = ""
    file: str = ""
    whole: bool = True
    trimmed: bool = False

    @property
    def method(self) -> str:
        """The method by its name in vLLM; empty if no method is named. Raises `LayoutFormError`."""
        inner, producer = self.config.get("quantization"), self.config.get("producer")
        made = isinstance(producer, Mapping) and producer.get("name") == "modelopt"
        if isinstance(inner, Mapping) and (made or "modelopt_quant_config" in inner):
            algo = inner.get("quant_algo")
            if algo is not None and str(algo).upper() not in _MODELOPT_ALGOS:
                known = ", ".join(_MODELOPT_ALGOS)
                raise self.unknown("quantization.quant_algo", algo, f"one of {known}")
            if algo is not None:
                return _MODELOPT_ALGOS[str(algo).upper()]
        method = self.config.get("quant_method")
        if method is None or method == "":
            return ""
        name = str(method).lower().replace("compressed_tensors", "compressed-tensors")
        if name not in KNOWN:
            raise self.unknown("quant_method", method, f"one of {', '.join(KNOWN)}")
        if name.startswith("modelopt"):
            algo = (inner if isinstance(inner, Mapping) else self.config).get("quant_algo")
            named = (one for part, one in _MODELOPT_PARTS.items() if part in str(algo).upper())
            return next(named, name)
        return name

    def key(self, name: str) -> str:
        """Return the full name of a key inside."""
        return f"{self.place}.{name}" if self.place else name

    def took(self, readings: Readings, name: str, value: object, note: str = "") -> None:
        """Note that a value inside was read."""
        readings.add(Reading(self.key(name), value, self.file, note))

    def unknown(self, name: str, value: object, wanted: str) -> LayoutFormError:
        """Return the error about a value that does not determine the type of KV."""
        where = "config" if self.file == CONFIG else self.file
        key = self.key(name)
        return LayoutFormError(
            f"{where}: {key}: {value!r:.120} is not {wanted}: name the type of KV (--kv-dtype)",
            key=key,
        )


def quantisation_of(
    whole: ConfigKeys,
    text: ConfigKeys,
    quant_config: Mapping[str, Any] | None,
    looking: bool = False,
) -> Quantisation:
    """Return the declaration in the first place where vLLM 0.32 looks (`get_quant_config`).

    ``quant_config`` is ModelOpt's file beside the config: it counts if the config itself has no
    ``quantization_config`` (`transformers_utils/config.py`, `get_config`). vLLM leaves a trimmed
    declaration aside, so that it counts only if the layout is for ``looking`` at. Raises
    `LayoutFormError` for a declaration that is no object.
    """
    if whole.has("quantization_config"):
        config = whole.part("quantization_config").config
        return _filled(Quantisation(config, "quantization_config", CONFIG), looking)
    if quant_config is not None:
        if not isinstance(quant_config, Mapping):
            raise LayoutFormError(f"{QUANT_CONFIG} holds no JSON object", key=QUANT_CONFIG)
        return _filled(Quantisation(quant_config, "", QUANT_CONFIG), looking)
    if text.has("quantization_config"):
        config = text.part("quantization_config").config
        return Quantisation(config, f"{text.path}quantization_config", CONFIG, whole=False)
    return Quantisation(whole.part("compression_config").config, "compression_config", CONFIG)


def _filled(said: Quantisation, looking: bool) -> Quantisation:
    """Return a declaration with ModelOpt's method if an algorithm of ModelOpt's stands alone."""
    inner, producer = said.config.get("quantization", said.config), said.config.get("producer")
    algo = inner.get("quant_algo") if isinstance(inner, Mapping) else None
    own = (
        inner is said.config
        and isinstance(producer, Mapping)
        and producer.get("name") == "modelopt"
    )
    if not looking or not algo or said.config.get("quant_method") or (producer and not own):
        return said
    return replace(said, config={**said.config, "quant_method": "modelopt"}, trimmed=True)


@dataclass(frozen=True, slots=True)
class KvTypes:
    """Find the type and the scales of keys and values, as vLLM 0.32 would choose them.

    The type is ``asked``, or else what the checkpoint declares, or else the ``model``'s. No config
    holds static scales: the checkpoint's ``revision`` identifies the scales that it declares.
    If ``scales`` would have to be guessed, they are unknown if the layout is for ``looking`` at,
    else `LayoutFormError` is raised.
    """

    model: DType
    asked: DType | None
    scales: Scales | None
    quantisation: Quantisation
    readings: Readings
    revision: str = ""
    looking: bool = False

    def chosen(self, latents: bool = False) -> tuple[DType, Scales]:
        """Return type and scales of the KV of heads, or of latents. Raises `LayoutFormError`.

        For latents (MLA) vLLM ignores what compressed-tensors declares (`mla_attention.py` against
        `attention.py`).
        """
        declared = self._declared(latents)
        dtype, scales = self.asked or declared or self.model, self.scales
        if dtype not in QUANTISED:
            if not dtype.castable:
                raise LayoutFormError(
                    f"KV of type {dtype.label} does not say what its bytes are: name the type of "
                    f"the elements, such as float8_e4m3fn"
                )
            scales = scales or NO_SCALES
        elif scales is None or (self.quantisation.trimmed and self.asked is None):
            scales = self._default(dtype, declared)
        scales.check(dtype)
        if dtype is DType.INT8 and scales.kind is ScaleKind.NONE:
            raise LayoutFormError("KV of type int8 has scales; say which (--kv-scales)")
        return dtype, scales

    def _default(self, dtype: DType, declared: DType | None) -> Scales:
        """Return the scales if none were asked for. Raises `LayoutFormError` for a guess."""
        place = self.quantisation.place or self.quantisation.file
        if dtype is DType.INT8 or not self.quantisation.config:
            return NO_SCALES
        if declared is not None and self.revision and not self.quantisation.trimmed:
            note = "the scales that the revision's checkpoint declares"
            self.readings.add(Reading("kv_scales", "static", note=note))
            return Scales(ScaleKind.STATIC, self.revision)
        if self.looking and dtype is not PACKED:
            note = f"{_NAME_THEM}, or say that there are none (--kv-scales none)"
            if self.quantisation.trimmed:
                note = "a trimmed declaration of ModelOpt's, which vLLM leaves aside: take the "
                note += "whole file, or name type and scales (--kv-dtype, --kv-scales)"
            self.readings.add(Reading("kv_scales", UNKNOWN_SCALES, note=note))
            return Scales(ScaleKind.UNKNOWN)
        if declared is not None:
            raise LayoutFormError(
                f"config: {place} declares a KV cache of {declared.label} with static "
                f"scales: {_NAME_THEM}, or give KV another type (--kv-dtype)",
                key=place,
            )
        raise LayoutFormError(
            f"config: the checkpoint is quantised ({place}), so it may hold scales of "
            f"KV that the config does not mention: {_NAME_THEM}, or say that there are none "
            f"(--kv-scales none)",
            key=place,
        )

    def _declared(self, latents: bool) -> DType | None:
        """Return the type that the checkpoint declares and vLLM heeds; None if there is none.

        Raises `LayoutFormError` if that can't be told and no type was asked for.
        """
        try:
            method = self.quantisation.method
            if method.startswith("modelopt"):
                return self._by_modelopt()
            if method == "compressed-tensors":
                return self._by_compressed_tensors(latents)
            self._leave_aside(heeded=not method)
        except LayoutFormError:
            if self.asked is None:
                raise
        return None

    def _by_modelopt(self) -> DType | None:
        """Return ModelOpt's type, as `get_kv_cache_quant_algo_string` (`utils/torch_utils.py`).

        Only a declaration for the whole model counts.
        """
        if not self.quantisation.whole:
            self._leave_aside()
            return None
        name, scheme = next(self._said(), ("", None))
        if not name:
            return None
        if isinstance(scheme, Mapping):
            form = (scheme.get("type"), scheme.get("num_bits"), scheme.get("dynamic"))
            fits = form[:2] == ("float", 8) and form[2] is False
        else:
            fits = isinstance(scheme, str) and scheme.lower() == "fp8"
        return self._float8(name, scheme, fits)

    def _by_compressed_tensors(self, latents: bool) -> DType | None:
        """Return the type as `CompressedTensorsKVCacheMethod.validate_kv_cache_scheme` does."""
        scheme = self.quantisation.config.get("kv_cache_scheme")
        if scheme is None or latents:
            self._leave_aside()
            return None
        fits = isinstance(scheme, Mapping) and (
            (scheme.get("type"), scheme.get("num_bits")) == ("float", 8)
            and scheme.get("strategy") in ("tensor", "attn_head")
            and bool(scheme.get("symmetric"))
        )
        return self._float8("kv_cache_scheme", scheme, fits)

    def _float8(self, name: str, scheme: object, fits: bool) -> DType:
        if not fits:
            raise self.quantisation.unknown(name, scheme, _FP8)
        self.quantisation.took(self.readings, name, scheme, f"KV is {DType.FLOAT8_E4M3FN.label}")
        return DType.FLOAT8_E4M3FN

    def _leave_aside(self, heeded: bool = False) -> None:
        """Note declarations that vLLM does not heed.

        Raises `LayoutFormError` if vLLM may heed them, because no method is named beside them.
        """
        for name, scheme in self._said():
            if heeded:
                raise self.quantisation.unknown(
                    name, scheme, "heeded by vLLM 0.32, for no quant_method stands beside it"
                )
            self.quantisation.took(self.readings, name, scheme, _LEFT_ASIDE)

    def _said(self) -> Iterator[tuple[str, object]]:
        """Yield key and value of each declaration, in the order in which they count."""
        inner = self.quantisation.config.get("quantization")
        for key in _DECLARING:
            if isinstance(inner, Mapping) and inner.get(key):
                yield f"quantization.{key}", inner[key]
            if self.quantisation.config.get(key):
                yield key, self.quantisation.config[key]


@dataclass(frozen=True, slots=True)
class Types:
    """The types of a model's states; if ``ssm`` is None, the family chooses its type.

    The types of keys and values are found when a layer has keys and values.
    """

    keys_and_values: KvTypes
    conv: DType
    ssm: DType | None
    weights: DType

    @property
    def kv(self) -> DType:
        """The type of keys and values of heads."""
        return self.keys_and_values.chosen()[0]

    @property
    def scales(self) -> Scales:
        """The scales of keys and values of heads."""
        return self.keys_and_values.chosen()[1]

    def attention(self, kv_heads: int, head_dim: int) -> AttentionSpec:
        """Return a layer with keys and values of heads."""
        return AttentionSpec(0, kv_heads, head_dim, self.kv, scales=self.scales)

    def latent(self, latent_dim: int) -> MlaSpec:
        """Return a layer with one latent vector per token."""
        return MlaSpec(0, latent_dim, *self.keys_and_values.chosen(latents=True))

    def mixer(self, keys: ConfigKeys, bias_key: str, obstacle: str = "") -> Mixer:
        """Return a recurrent layer's input; ``obstacle`` says why windows can't be rebuilt."""
        quantisation = self.keys_and_values.quantisation
        if not obstacle and keys.config.get(bias_key):
            # Taps before the prompt are zero, and the product of zeros with a bias is not zero.
            obstacle = f"the in-projection has a bias ({bias_key})"
        if not obstacle and quantisation.config:
            obstacle = f"the in-projection is quantized ({quantisation.place or quantisation.file})"
        return Mixer(keys.number("hidden_size"), self.weights, obstacle)

    def state(self, keys: ConfigKeys, key: str = "", unless_named: DType | None = None) -> DType:
        """Return the type of recurrent states; vLLM's "auto" means the type of the conv states."""
        return self.ssm or keys.dtype(key, self.conv, unless_named)
