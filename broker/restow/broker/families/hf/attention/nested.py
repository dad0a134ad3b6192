"""Models with attention alone whose text model stands in a part of the config."""

from __future__ import annotations

from restow.broker.families.hf.layers import WholeTable
from restow.broker.families.hf.nested import Whole

NESTED: WholeTable = {
    "aria": Whole("aria_text", fixed=True),
    "cohere2_vision": Whole("cohere2"),
    "ernie4_5_vl_moe": Whole("ernie4_5_vl_moe_text", fixed=True),
    "exaone4_5": Whole("exaone4"),
    "gemma3": Whole("gemma3_text", fixed=True),
    "gemma3n": Whole("gemma3n_text", fixed=True),
    "gemma4": Whole("gemma4_text", fixed=True),
    "gemma4_unified": Whole("gemma4_unified_text", fixed=True),
    "glm4v": Whole("glm4v_text", fixed=True),
    "glm4v_moe": Whole("glm4v_moe_text", fixed=True),
    "glm_ocr": Whole("glm_ocr_text", fixed=True),
    "idefics3": Whole("llama"),
    "internvl": Whole("qwen2"),
    "internvl_chat": Whole("qwen2"),
    "llama4": Whole("llama4_text", fixed=True),
    "llava": Whole("llama"),
    "llava_next": Whole("llama"),
    "mistral3": Whole("mistral"),
    "paddleocr_vl": Whole("paddleocr_vl_text", flat=True, fixed=True),
    "paligemma": Whole("gemma"),
    "qwen2_5_omni": Whole("qwen2_5_omni_text", name="qwen2_5_omni_text", fixed=True),
    "qwen2_5_vl": Whole("qwen2_5_vl_text", flat=True, fixed=True),
    "qwen2_vl": Whole("qwen2_vl_text", flat=True, fixed=True),
    "qwen3_asr": Whole("qwen3"),
    "qwen3_omni_moe": Whole("qwen3_omni_moe_text", name="qwen3_omni_moe_text", fixed=True),
    "qwen3_vl": Whole("qwen3_vl_text", fixed=True),
    "qwen3_vl_moe": Whole("qwen3_vl_moe_text", fixed=True),
    "smolvlm": Whole("llama"),
    "step3p7": Whole("step3p7_text", ("step3p5",), alone=True, name="step3p5"),
}
