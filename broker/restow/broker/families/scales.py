"""The scales of a quantised KV cache: what makes values of its elements."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from restow.broker.errors import LayoutFormError
from restow.broker.layout import DType
from restow.broker.words import Worded

PACKED = DType.FLOAT4_E2M1FN_X2
QUANTISED = (DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2, DType.INT8, PACKED)
"""Types that elements of a KV cache are rounded to after they were divided by a scale."""
SCALE_DTYPE = DType.FLOAT32
SIXTEENTH_DTYPE = DType.FLOAT8_E4M3FN
BLOCK_DIM = 16
"""Of a scale for so many elements of a head."""


class ScaleKind(StrEnum):
    """Where a KV cache has its scales."""

    NONE = "none"
    """Elements are the values, as if every scale were 1.0."""
    STATIC = "static"
    """From the checkpoint, or calibrated once: no state, so both engines must have the same ones
    (vLLM `fp8`, `fp8_e4m3`, `fp8_e5m2`: `layer._k_scale` and `_v_scale`)."""
    PER_TOKEN_HEAD = "per-token-head"  # noqa: S105
    """A float32 for each token and head, in the cache and moved with it (vLLM
    `fp8_per_token_head`, `int8_per_token_head`)."""
    PER_BLOCK = "per-block"
    """A float32 for each token and block of its latent, in the cache and moved with it (vLLM
    `fp8_ds_mla`)."""
    PER_16 = "per-16"
    """A float8_e4m3fn for each token, head and 16 elements, in the cache and moved with it, and a
    static one of all, that both engines must have alike (vLLM `nvfp4`)."""


NAMED = (ScaleKind.STATIC, ScaleKind.PER_16)
"""Kinds of which a part is static."""


@dataclass(frozen=True, slots=True)
class Scales(Worded):
    """The scales of a layer's KV; ``fingerprint`` tells static ones apart, also beside others.

    Any text does that is equal exactly when the scales are, such as a checkpoint's revision.
    """

    kind: ScaleKind = ScaleKind.NONE
    fingerprint: str = ""

    @property
    def per_token(self) -> bool:
        """Whether each token has one for a head, in the cache."""
        return self.kind is ScaleKind.PER_TOKEN_HEAD

    @property
    def words(self) -> str:
        """What a field says of them."""
        if self.kind is ScaleKind.STATIC:
            return f"static {self.fingerprint}"
        if self.kind is ScaleKind.PER_16:
            return f"per token, head and 16 elements, static {self.fingerprint}"
        return "per token and head" if self.per_token else ""

    def check(self, dtype: DType) -> None:
        """Raise `LayoutFormError` for a type that has no scales, or for scales without a name."""
        if (self.kind in NAMED) != bool(self.fingerprint):
            raise LayoutFormError(
                f"scales of kind {self.kind} with fingerprint {self.fingerprint!r}: static scales "
                f"need one that P and D share, as those per 16 elements do, and no others have one"
            )
        if (self.kind is ScaleKind.PER_16) != (dtype is PACKED):
            raise LayoutFormError(
                f"KV of type {dtype.label} with scales of kind {self.kind}: {PACKED.label} has "
                f"scales {ScaleKind.PER_16}, and no other type has those"
            )
        if self.kind is not ScaleKind.NONE and dtype not in QUANTISED:
            known = ", ".join(one.label for one in QUANTISED)
            raise LayoutFormError(
                f"KV of type {dtype.label} has no scales, but {self.kind} ones are given: "
                f"give it a type of {known}, or leave them out"
            )


NO_SCALES = Scales()
