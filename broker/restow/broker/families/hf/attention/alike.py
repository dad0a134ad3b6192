"""Models with attention alone, in layers of one shape: full, or in sliding windows.

The numbers are the defaults of configuration classes; where there are none, the class comes with
the checkpoint, and the config has to say them.
"""

from __future__ import annotations

from dataclasses import replace

from restow.broker.families.hf.attention.reader import Gqa, every, full
from restow.broker.families.hf.keys import Keys
from restow.broker.families.hf.layers import Layers, ModelTable
from restow.broker.families.hf.types import Types

_GPT2 = (
    ("num_hidden_layers", "n_layer"),
    ("num_attention_heads", "n_head"),
    ("hidden_size", "n_embd"),
)
_BLOOM = (*_GPT2[:2], ("hidden_size", "n_embed"))


def _from_layer(keys: Keys, count: int) -> list[str]:
    """Qwen2 and Qwen3: windows from layer ``max_window_layers`` on."""
    start = keys.number("max_window_layers", 28, least=0)
    return ["sliding" if i >= start else "attention" for i in range(count)]


def _without_rope(keys: Keys, count: int) -> list[str]:
    """SmolLM3: windows, if it uses any, in layers without rotary embeddings."""
    if not keys.config.get("use_sliding_window", False):
        return full(keys, count)
    period = keys.number("no_rope_layer_interval", 4)
    roped = keys.config.get("no_rope_layers") or [int((i + 1) % period != 0) for i in range(count)]
    if not isinstance(roped, list | tuple) or len(roped) != count:
        raise keys.wrong("no_rope_layers", roped, f"a list of {count} layers")
    return ["attention" if one else "sliding" for one in roped]


def _after_dense(keys: Keys, count: int) -> list[str]:
    """Cohere 2 MoE: dense layers stand first, with a pattern of their own."""
    dense = min(keys.number("first_k_dense_replace", 0, least=0), count)
    first = every(1, "prefix_dense_sliding_window_pattern")(keys, dense)
    return first + every(4, "sliding_window_pattern")(keys, count - dense)


def _gpt_oss(keys: Keys, types: Types) -> Layers:
    """GPT-OSS: vLLM has windows in every even layer, whatever the config lists."""
    form = Gqa(36, 2880, 64, 8, 64, window=128, kinds=every(2))
    count = keys.number("num_hidden_layers", 36)
    if (keys.listed_kinds(36) or every(2)(keys, count)) != every(2)(keys, count):
        said = ": windows stand in other layers than 0, 2, 4, ..., where vLLM has them"
        raise keys.fault("layer_types", said)
    return form(keys, types)


def _exaone_moe(keys: Keys, types: Types) -> Layers:
    """K-EXAONE: as EXAONE 4, unless every layer has a window of its own size."""
    if keys.has("sliding_windows"):
        raise keys.wrong(
            "sliding_windows", keys.config["sliding_windows"], "known: only one size is"
        )
    return Gqa(32, 4096, 32, 32, window=4096, kinds=every(4, "sliding_window_pattern"))(keys, types)


def _chatglm(keys: Keys, types: Types) -> Layers:
    """ChatGLM: grouped queries only where ``multi_query_attention`` says so."""
    grouped = keys.config.get("multi_query_attention", False)
    form = Gqa(
        28, 4096, 32, sized=False, by_layer=False, names=(("num_hidden_layers", "num_layers"),)
    )
    return form(
        _with_kv_heads(keys, keys.number("multi_query_group_num", 1) if grouped else None), types
    )


def _falcon(keys: Keys, types: Types) -> Layers:
    """Falcon: one head with keys, unless the config has the new form."""
    names = (("num_hidden_layers", "n_layer"), ("num_attention_heads", "n_head"))
    form = Gqa(32, 4544, 71, sized=False, by_layer=False, names=names)
    kv_heads = 1 if keys.config.get("multi_query", True) else None
    if keys.config.get("new_decoder_architecture", False):
        kv_heads = keys.number("num_kv_heads", keys.number("n_head_kv", 71))
    return form(_with_kv_heads(keys, kv_heads), types)


def _gpt_bigcode(keys: Keys, types: Types) -> Layers:
    """GPT BigCode: one head with keys, unless ``multi_query`` is false."""
    kv_heads = 1 if keys.config.get("multi_query", True) else None
    return Gqa(12, 768, 12, sized=False, names=_GPT2)(_with_kv_heads(keys, kv_heads), types)


def _step3(keys: Keys, types: Types) -> Layers:
    """Step 3: queries are made of latents; one head has keys, which every rank holds."""
    if keys.number("num_attention_groups", 1) != 1:
        raise keys.wrong("num_attention_groups", keys.config["num_attention_groups"], "1")
    return Gqa(61, 7168, 64, head_dim=256, by_layer=False)(_with_kv_heads(keys, 1), types)


def _dbrx(keys: Keys, types: Types) -> Layers:
    """DBRX: heads with keys are in ``attn_config``."""
    names = (
        ("num_hidden_layers", "n_layers"),
        ("num_attention_heads", "n_heads"),
        ("hidden_size", "d_model"),
    )
    kv_heads = keys.part("attn_config").number("kv_n_heads", 1)
    return Gqa(24, 2048, 16, sized=False, by_layer=False, names=names)(
        _with_kv_heads(keys, kv_heads), types
    )


def _with_kv_heads(keys: Keys, kv_heads: int | None) -> Keys:
    return keys.put("num_key_value_heads", kv_heads)


_SAID = Gqa(by_layer=False)
"""A config that says all of its numbers."""
_SPLIT = replace(_SAID, sized=False)
_GEMMA2 = Gqa(26, 2304, 8, 4, 256, window=4096, kinds=every(2))
_LLAMA = Gqa(32, 4096, 32)
_GRANITE_MOE = Gqa(32, 4096, 32, sized=False)
_QWEN2 = Gqa(
    32,
    4096,
    32,
    32,
    window=4096,
    kinds=_from_layer,
    sized=False,
    gate="use_sliding_window",
    uniform=True,
)
_QWEN2_VL = replace(_QWEN2, layers=80, hidden=8192, heads=64, kv_heads=8)
_MINICPM_V = Gqa(kinds=_from_layer, gate="use_sliding_window", uniform=True)
"""Of whichever language model the version has: Llama, Qwen2 or Qwen3."""

ALIKE: ModelTable = {
    "afmoe": Gqa(32, 2048, 16, 16, 128, window=1024, kinds=every(4, "global_attn_every_n_layers")),
    "apertus": Gqa(32, 4096, 32),
    "arcee": Gqa(32, 2560, 32),
    "aria_text": _LLAMA,
    "bailing_moe": _SAID,
    "bloom": Gqa(2, 64, 8, sized=False, by_layer=False, names=_BLOOM),
    "chatglm": _chatglm,
    "cohere": Gqa(40, 8192, 64, by_layer=False),
    "cohere2": Gqa(40, 8192, 64, window=4096, kinds=every(4, "sliding_window_pattern"), extra=1),
    "cohere2_moe": Gqa(40, 8192, 64, head_dim=128, window=4096, kinds=_after_dense, extra=1),
    "cwm": Gqa(64, 6144, 48, 8, 128, window=8192, kinds=every(4, first=3)),
    "dbrx": _dbrx,
    "deepseek": _SPLIT,
    "dots_ocr": _QWEN2,
    "ernie4_5": Gqa(18, 1024, 16, 2, 128),
    "ernie4_5_moe": Gqa(28, 2560, 20, 4, by_layer=False),
    "ernie4_5_vl_moe_text": Gqa(28, 2560, 20, 4, by_layer=False),
    "exaone": replace(_SAID, names=(("num_hidden_layers", "num_layers"),)),
    "exaone4": Gqa(32, 4096, 32, 32, window=4096, kinds=every(4, "sliding_window_pattern")),
    "exaone_moe": _exaone_moe,
    "falcon": _falcon,
    "flex_olmo": _LLAMA,
    "gemma": Gqa(28, 3072, 16, 16, 256, by_layer=False),
    "gemma2": _GEMMA2,
    "gemma3_text": replace(_GEMMA2, kinds=every(6, "sliding_window_pattern")),
    "glm": Gqa(40, 4096, 32, 2, 128),
    "glm4": Gqa(40, 4096, 32, 2, 128, by_layer=False),
    "glm4_moe": Gqa(46, 4096, 96, 8, by_layer=False),
    "glm4v_moe_text": Gqa(46, 4096, 96, 8, by_layer=False),
    "glm4v_text": Gqa(40, 4096, 32, 2, by_layer=False),
    "glm_ocr_text": Gqa(16, 1024, 16, 8, by_layer=False),
    "gpt2": Gqa(12, 768, 12, sized=False, names=_GPT2, by_layer=False),
    "gpt_bigcode": _gpt_bigcode,
    "gpt_neox": Gqa(44, 6144, 64),
    "gpt_oss": _gpt_oss,
    "gptj": Gqa(28, 4096, 16, sized=False, names=_GPT2, by_layer=False),
    "granite": _LLAMA,
    "granite_swa": Gqa(24, 2560, 20, 4, window=128, kinds=every(4, first=3)),
    "granitemoe": _GRANITE_MOE,
    "granitemoe_swa": replace(_GRANITE_MOE, window=128, kinds=every(4, first=3)),
    "granitemoeshared": _GRANITE_MOE,
    "hunyuan_v1_dense": _LLAMA,
    "hunyuan_v1_moe": _LLAMA,
    "hy_v3": Gqa(80, 4096, 64, 8, 128, by_layer=False),
    "hyperclovax": replace(_LLAMA, by_layer=False),
    "internlm2": _SPLIT,
    "internlm3": Gqa(),
    "iquestcoder": Gqa(),
    "jais2": Gqa(32, 3328, 26),
    "laguna": Gqa(40, 2048, 48, 8, 128, window=512, kinds=full),
    "llama": _LLAMA,
    "mellum": Gqa(28, 2304, 32, 4, 128, window=1024, kinds=full),
    "mimo": replace(_QWEN2, layers=None, hidden=None, heads=None, kv_heads=None),
    "minicpm": _SPLIT,
    "minicpmo": _MINICPM_V,
    "minicpmv": _MINICPM_V,
    "minimax_m2": Gqa(62, 3072, 48, 8, 128, by_layer=False),
    "ministral": Gqa(32, 4096, 32, 8, window=4096),
    "ministral3": Gqa(34, 4096, 32, 8, 128),
    "mistral": Gqa(32, 4096, 32, 8, window=4096),
    "mixtral": Gqa(32, 4096, 32, 8, by_layer=False),
    "nemotron": Gqa(32, 6144, 48, by_layer=False),
    "olmo": _LLAMA,
    "olmo2": _LLAMA,
    "olmo3": replace(_LLAMA, window=4096, kinds=every(4)),
    "olmoe": Gqa(16, 2048, 16, 16, sized=False, by_layer=False),
    "opt": Gqa(12, 768, 12, sized=False, by_layer=False),
    "orion": _SPLIT,
    "paddleocr_vl_text": Gqa(18, 1024, 16, 2, 128),
    "phi": Gqa(24, 2048, 32),
    "phi3": Gqa(32, 3072, 32),
    "phi3_v": _SAID,
    "phi4mm": _SAID,
    "phimoe": Gqa(32, 4096, 32, 8, by_layer=False),
    "qwen2": _QWEN2,
    "qwen2_5_omni_text": replace(
        _QWEN2, layers=28, hidden=3584, heads=28, kv_heads=4, window=32768
    ),
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen2_moe": Gqa(
        24,
        2048,
        16,
        16,
        window=4096,
        kinds=full,
        by_layer=False,
        sized=False,
        gate="use_sliding_window",
    ),
    "qwen2_vl_text": _QWEN2_VL,
    "qwen3": replace(_QWEN2, head_dim=128, sized=True),
    "qwen3_moe": Gqa(24, 2048, 32, 4, window=4096, by_layer=False, gate="use_sliding_window"),
    "qwen3_omni_moe_text": Gqa(28, 2048, 28, 4, by_layer=False),
    "qwen3_vl_moe_text": Gqa(24, 2048, 16, 16, by_layer=False),
    "qwen3_vl_text": Gqa(32, 4096, 32, 32, 128, by_layer=False),
    "seed_oss": Gqa(64, 4096, 80, 8, 128),
    "smollm3": Gqa(36, 2048, 16, 4, kinds=_without_rope),
    "solar": _SAID,
    "stablelm": Gqa(32, 2560, 32, 32, sized=False, by_layer=False),
    "starcoder2": Gqa(30, 3072, 24, 2),
    "step3_text": _step3,
    "telechat3": Gqa(),
    "vaultgemma": _GEMMA2,
}
