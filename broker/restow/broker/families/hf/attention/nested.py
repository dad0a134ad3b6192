"""Models with attention alone whose text model stands in a part of the config."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from restow.broker.errors import LayoutFormError
from restow.broker.families.hf.attention.alike import ALIKE
from restow.broker.families.hf.attention.uneven import UNEVEN
from restow.broker.families.hf.keys import Keys, wrong
from restow.broker.families.hf.layers import Layers, ModelTable
from restow.broker.families.hf.types import Types

_TEXT: ModelTable = {**ALIKE, **UNEVEN}
_TEXT_PARTS = ("text_config", "llm_config")


def _nested(default: str, flat: bool = False) -> Callable[[Keys, Types], Layers]:
    """Return what reads a config whose text part has a ``model_type`` of its own, or ``default``.

    Older configs of some types have the text's keys beside the others (``flat``).
    """

    def read(keys: Keys, types: Types) -> Layers:
        part = next((key for key in _TEXT_PARTS if keys.has(key)), None)
        if part is None:
            if flat and keys.has("num_hidden_layers"):
                return _TEXT[default](keys, types)
            raise LayoutFormError(
                f"config: 'text_config' is missing: a {keys.text('model_type')} has its text "
                f"model there",
                key="text_config",
            )
        config = keys.config[part]
        if not isinstance(config, Mapping):
            raise wrong(part, config, "an object")
        text = Keys(config)
        model_type = text.text("model_type") if text.has("model_type") else default
        reader = _TEXT.get(model_type)
        if reader is None:
            raise LayoutFormError(
                f"config: {part}.model_type: {model_type!r} is unknown as a text part; known are "
                f"{', '.join(sorted(_TEXT))}",
                key=f"{part}.model_type",
            )
        return reader(text, types)

    return read


NESTED: ModelTable = {
    "cohere2_vision": _nested("cohere2"),
    "ernie4_5_vl_moe": _nested("ernie4_5_vl_moe_text"),
    "exaone4_5": _nested("exaone4"),
    "gemma3": _nested("gemma3_text"),
    "gemma3n": _nested("gemma3n_text"),
    "gemma4": _nested("gemma4_text"),
    "gemma4_unified": _nested("gemma4_unified_text"),
    "glm4v": _nested("glm4v_text"),
    "glm4v_moe": _nested("glm4v_moe_text"),
    "idefics3": _nested("llama"),
    "internvl": _nested("qwen2"),
    "internvl_chat": _nested("qwen2"),
    "llama4": _nested("llama4_text"),
    "llava": _nested("llama"),
    "llava_next": _nested("llama"),
    "mistral3": _nested("mistral"),
    "paligemma": _nested("gemma"),
    "qwen2_5_vl": _nested("qwen2_5_vl_text", flat=True),
    "qwen2_vl": _nested("qwen2_vl_text", flat=True),
    "qwen3_vl": _nested("qwen3_vl_text"),
    "qwen3_vl_moe": _nested("qwen3_vl_moe_text"),
    "smolvlm": _nested("llama"),
    "step3p7": _nested("step3p7_text"),
}
