"""`KvTypes` finds type and scales of keys and values, by what was asked and what is declared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from restow.broker.errors import LayoutFormError
from restow.broker.families.hf.quantization import Quantisation
from restow.broker.families.hf.readings import Reading, Readings
from restow.broker.families.specs import NO_SCALES, QUANTISED, ScaleKind, Scales
from restow.broker.layout import DType

_NAME_THEM = (
    "name the static scales by what is equal on P and D exactly when they are, such as the "
    "checkpoint's revision (--revision TEXT, or --kv-scales static --kv-scales-fingerprint TEXT)"
)
_DECLARING = ("kv_cache_scheme", "kv_cache_quant_algo")
_LEFT_ASIDE = "left aside, as vLLM 0.32 does: KV has the model's type"
_FP8 = "static float8, the one that a family describes"


@dataclass(frozen=True, slots=True)
class KvTypes:
    """Finds the type and the scales of keys and values, as vLLM 0.32 would choose them.

    Without ``asked`` the checkpoint's own type holds, else the ``model``'s. Which static scales
    there are no config says: the checkpoint's ``revision`` stands for those that it declares, and
    `LayoutFormError` says where ``scales`` would have to be guessed.
    """

    model: DType
    asked: DType | None
    scales: Scales | None
    found: Quantisation
    readings: Readings
    revision: str = ""

    def attention(self) -> tuple[DType, Scales]:
        """Return those of keys and values of heads. Raises `LayoutFormError`."""
        return self._chosen(latents=False)

    def latents(self) -> tuple[DType, Scales]:
        """Return those of latents (MLA). Raises `LayoutFormError`.

        vLLM takes no heed there of what compressed-tensors declares (`mla_attention.py` against
        `attention.py`).
        """
        return self._chosen(latents=True)

    def _chosen(self, latents: bool) -> tuple[DType, Scales]:
        declared = self._declared(latents)
        dtype, scales = self.asked or declared or self.model, self.scales
        if dtype not in QUANTISED:
            if not dtype.castable:
                raise LayoutFormError(
                    f"KV of type {dtype.label} does not say what its bytes are: name the type of "
                    f"the elements, such as float8_e4m3fn"
                )
            scales = scales or NO_SCALES
        elif scales is None:
            scales = self._default(dtype, declared)
        scales.check(dtype)
        if dtype is DType.INT8 and scales.kind is ScaleKind.NONE:
            raise LayoutFormError("KV of type int8 has scales; say which (--kv-scales)")
        return dtype, scales

    def _default(self, dtype: DType, declared: DType | None) -> Scales:
        """Return no scales where there can be none. Raises `LayoutFormError`."""
        place = self.found.place or self.found.file
        if dtype is DType.INT8 or not self.found.config:
            return NO_SCALES
        if declared is not None and self.revision:
            note = "those that the revision's checkpoint declares"
            self.readings.add(Reading("kv_scales", "static", note=note))
            return Scales(ScaleKind.STATIC, self.revision)
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
        """Return the type that the checkpoint declares where vLLM heeds it; None where not.

        Where it can't be told, and none was asked for: `LayoutFormError`.
        """
        try:
            method = self.found.method
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
        """As `get_kv_cache_quant_algo_string` (`utils/torch_utils.py`), of the model as a whole."""
        if not self.found.whole:
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
        """As `CompressedTensorsKVCacheMethod.validate_kv_cache_scheme` and `Attention`."""
        scheme = self.found.config.get("kv_cache_scheme")
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
            raise self.found.unknown(name, scheme, _FP8)
        self.found.took(self.readings, name, scheme, f"KV is {DType.FLOAT8_E4M3FN.label}")
        return DType.FLOAT8_E4M3FN

    def _leave_aside(self, heeded: bool = False) -> None:
        """Say what is declared and not heeded. Raises `LayoutFormError` where others may heed it.

        That is so where nothing says by which method the checkpoint was quantised.
        """
        for name, scheme in self._said():
            if heeded:
                raise self.found.unknown(
                    name, scheme, "heeded by vLLM 0.32, for no quant_method stands beside it"
                )
            self.found.took(self.readings, name, scheme, _LEFT_ASIDE)

    def _said(self) -> Iterator[tuple[str, object]]:
        """Yield key and value of what is declared, in the order in which it counts."""
        inner = self.found.config.get("quantization")
        for key in _DECLARING:
            if isinstance(inner, Mapping) and inner.get(key):
                yield f"quantization.{key}", inner[key]
            if self.found.config.get(key):
                yield key, self.found.config[key]
