"""`Quantisation` is what a checkpoint says of how it is quantised, and where it says so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from restow.broker.errors import LayoutFormError
from restow.broker.families.hf.keys import Keys
from restow.broker.families.hf.readings import CONFIG, QUANT_CONFIG, Reading, Readings

KNOWN = (
    *("auto_awq", "auto_gptq", "awq", "awq_marlin", "compressed-tensors", "deepseek_v4_fp8"),
    *("experts_int8", "fbgemm_fp8", "fp8", "fp_quant", "gpt_oss_mxfp4", "gptq", "gptq_marlin"),
    *("humming", "inc", "modelopt", "modelopt_fp4", "modelopt_mixed", "modelopt_mxfp8"),
    *("moe_wna16", "mxfp4", "mxfp8", "quark", "torchao"),
    # What its `override_quantization_method` takes for one of these.
    *("auto-round", "intel/auto-round"),
)
"""Methods of checkpoints that vLLM 0.32 has (`layers/quantization/__init__.py`)."""
_MODELOPT_ALGOS = {
    "FP8": "modelopt",
    "FP8_PER_CHANNEL_PER_TOKEN": "modelopt",
    "FP8_PB_WO": "modelopt",
    "NVFP4": "modelopt_fp4",
}
"""Of ModelOpt's own files (`ModelArchConfigConvertorBase._normalize_quantization_config`)."""


@dataclass(frozen=True, slots=True)
class Quantisation:
    """Holds what a checkpoint says of how it is quantised; nothing where it is not.

    ``place`` is the key that says it, in ``file``. ``whole`` is whether it is said of the model and
    not of its text part alone.
    """

    config: Mapping[str, Any]
    place: str = ""
    file: str = ""
    whole: bool = True

    @property
    def method(self) -> str:
        """How vLLM calls it; "" where nothing says so. Raises `LayoutFormError`."""
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
        return name

    def key(self, name: str) -> str:
        """Return the name of a key inside."""
        return f"{self.place}.{name}" if self.place else name

    def took(self, readings: Readings, name: str, value: object, note: str = "") -> None:
        """Say that a value inside was read."""
        readings.add(Reading(self.key(name), value, self.file, note))

    def unknown(self, name: str, value: object, wanted: str) -> LayoutFormError:
        """Return what to raise about a value that does not say what KV is."""
        where = "config" if self.file == CONFIG else self.file
        key = self.key(name)
        return LayoutFormError(
            f"{where}: {key}: {value!r:.120} is not {wanted}: name the type of KV (--kv-dtype)",
            key=key,
        )


def quantisation_of(
    whole: Keys, text: Keys, quant_config: Mapping[str, Any] | None
) -> Quantisation:
    """Return what is said, of the first place where vLLM 0.32 looks (`get_quant_config`).

    ``quant_config`` is ModelOpt's file beside the config: it counts where the config itself has no
    ``quantization_config`` (`transformers_utils/config.py`, `get_config`). Raises `LayoutFormError`
    for what is no object.
    """
    if whole.has("quantization_config"):
        config = whole.part("quantization_config").config
        return Quantisation(config, "quantization_config", CONFIG)
    if quant_config is not None:
        if not isinstance(quant_config, Mapping):
            raise LayoutFormError(f"{QUANT_CONFIG} holds no JSON object", key=QUANT_CONFIG)
        return Quantisation(quant_config, "", QUANT_CONFIG)
    if text.has("quantization_config"):
        config = text.part("quantization_config").config
        return Quantisation(config, f"{text.path}quantization_config", CONFIG, whole=False)
    return Quantisation(whole.part("compression_config").config, "compression_config", CONFIG)
