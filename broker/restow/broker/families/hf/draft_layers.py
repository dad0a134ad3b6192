"""`drafted` says what a model's layers of MTP keep, of the types whose config says it.

Such a layer is one more of the model's own with full attention (vLLM 0.32 `deepseek_mtp.py`,
`glm4_moe_mtp.py`, `glm4_moe_lite_mtp.py`, `mimo_mtp.py`, `qwen3_next_mtp.py`, `qwen3_5_mtp.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from restow.broker.errors import LayoutFormError
from restow.broker.families.hf.keys import Keys
from restow.broker.families.specs import AttentionSpec, LayerSpec, MlaSpec

MTP = "mtp"
"""What such a draft is called: its weights are the model's checkpoint's."""
_NEXTN, _MTP = "num_nextn_predict_layers", "mtp_num_hidden_layers"
_DECLARED: dict[str, tuple[str, int]] = {
    "deepseek_v3": (_NEXTN, 0),
    "glm4_moe": (_NEXTN, 0),
    "glm4_moe_lite": (_NEXTN, 0),
    "mimo": (_NEXTN, 0),
    "qwen3_5_moe_text": (_MTP, 1),
    "qwen3_5_text": (_MTP, 1),
    "qwen3_next": (_NEXTN, 1),
}
"""Which key counts them, and how many vLLM takes for granted where it is not there."""


def drafted(
    keys: Keys, model_type: str, own: Sequence[LayerSpec], first: int, count: int
) -> tuple[LayerSpec, ...]:
    """Return what ``count`` layers of the model's MTP keep, numbered from ``first`` on.

    Raises `LayoutFormError` for more than the config has, and for a type that says nothing of them.
    """
    if model_type not in _DECLARED:
        raise LayoutFormError(
            f"draft layers of a {model_type!r}: what they keep is not known; it is of "
            f"{', '.join(sorted(_DECLARED))}",
            model_type=model_type,
        )
    key, default = _DECLARED[model_type]
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
