"""Models with attention alone: full, in sliding windows, or of several shapes.

Windows are those of vLLM (`engine/arg_utils.py`, `model_executor/layers/attention/attention.py`): a
window of ``sliding_window`` tokens contains the token itself, so the next token sees one fewer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from restow.broker.families.hf.keys import ConfigKeys
from restow.broker.families.hf.kv_types import Types
from restow.broker.families.recurrent import RecurrentSpec
from restow.broker.families.specs import AttentionSpec, LayerSpec, MlaSpec

Layers = list[tuple[LayerSpec, ...]]
"""The state of each layer of a model; empty for a layer without state."""
Reader = Callable[[ConfigKeys, Types], Layers]
"""Reads the layers of a language model from its config."""
ModelTable = dict[str, Reader]
"""Readers by ``model_type``."""


def layers_by_kind(
    keys: ConfigKeys,
    kinds: Sequence[str],
    attention: AttentionSpec | MlaSpec | None,
    recurrent: RecurrentSpec | None = None,
    sliding: AttentionSpec | None = None,
) -> Layers:
    """Return the state of layers of these kinds. Raises `LayoutFormError` for an unknown kind."""
    by_kind: dict[str, tuple[LayerSpec | None, ...]] = {
        "attention": (attention,),
        "recurrent": (recurrent,),
        "both": (attention, recurrent),
        "sliding": (sliding,),
        "none": (),
    }
    layers: Layers = []
    for index, kind in enumerate(kinds):
        specs: list[LayerSpec] = []
        for spec in by_kind[kind]:
            if spec is None:
                problem = f": layer {index}: this model type has no layers of that kind ({kind})"
                raise keys.fault("layer_types", problem)
            specs.append(replace(spec, layer=index))
        layers.append(tuple(specs))
    return layers


@dataclass(frozen=True, slots=True)
class Gqa:
    """Read the layers of a model with grouped-query attention, by the keys that vLLM heeds.

    vLLM heeds ``layer_types`` if ``by_layer`` and ``head_dim`` if ``sized``. Unless ``grouped``,
    all heads have keys if the config says nothing. With ``windows`` the configuration class may
    have windows that the config leaves out, and with ``listed`` a list of the layers that have
    them; ``kinds`` makes that list if the class is not asked. Without the key ``gate`` there are
    no windows. vLLM adds ``extra`` tokens to them, and starts no ``uniform`` model with windows in
    only some layers. ``names`` are the config's own names for keys.
    """

    by_layer: bool = True
    sized: bool = True
    grouped: bool = True
    windows: bool = False
    listed: bool = False
    kinds: Callable[[ConfigKeys, int], list[str]] | None = None
    uniform: bool = False
    gate: str = ""
    extra: int = 0
    names: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, keys: ConfigKeys, types: Types) -> Layers:
        """Return the state of each layer. Raises `LayoutFormError`."""
        keys = keys.renamed(self.names)
        for key in ("per_layer_config", "sliding_windows"):
            if keys.has(key):
                raise keys.wrong(key, keys.config[key], "known for this type")
        attention = types.attention(*self.shape(keys))
        kinds, window_tokens = self.layer_windows(keys)
        sliding = replace(attention, window_tokens=window_tokens)
        return layers_by_kind(keys, kinds, attention, sliding=sliding)

    def shape(self, keys: ConfigKeys) -> tuple[int, int]:
        """Return the number of heads with keys and their size. Raises `LayoutFormError`."""
        heads, key = keys.number("num_attention_heads"), "num_key_value_heads"
        kv_heads = keys.number(key, None if self.grouped else heads, derived=heads)
        if heads % kv_heads:
            raise keys.wrong(key, kv_heads, f"a divisor of num_attention_heads, {heads}")
        if self.sized and (
            keys.has("head_dim")
            or ("head_dim" not in keys.config and keys.class_default("head_dim") is not None)
        ):
            return kv_heads, keys.number("head_dim")
        hidden = keys.number("hidden_size")
        if hidden % heads:
            wanted = f"a multiple of num_attention_heads, {heads}, and there is no head_dim"
            raise keys.wrong("hidden_size", hidden, wanted)
        return kv_heads, hidden // heads

    def layer_windows(self, keys: ConfigKeys) -> tuple[list[str], int]:
        """Return the kinds of all layers, and how many tokens the next token sees in a window."""
        both = keys.config.get("use_bidirectional_attention")
        if both not in (None, False, "vision"):
            raise keys.wrong("use_bidirectional_attention", both, "of a model that decodes")
        count = keys.number("num_hidden_layers")
        kinds = keys.listed_kinds(count)
        window = 0
        if not self.gate or keys.config.get(self.gate, False):
            default = None if self.windows else 0
            window = keys.number("sliding_window", default, least=0, derived=0)
        if not window:
            return ["attention"] * count, 0
        if window == 1:
            raise keys.wrong("sliding_window", window, "0, or 2 or more tokens")
        if kinds is None and self.kinds:
            kinds = self.kinds(keys, count)
        elif kinds is None:
            kinds = self._of_class(keys, count, window) if self.listed else ["sliding"] * count
        if self.uniform and len(set(kinds)) > 1:
            problem = (
                ": windows in some of the layers (max_window_layers): vLLM serves this model type "
                "with windows in all of them or in none"
            )
            raise keys.fault("layer_types", problem)
        if not self.by_layer and "attention" in kinds:
            kinds = ["attention"] * count
        return kinds, window - 1 + self.extra

    def _of_class(self, keys: ConfigKeys, count: int, window: int) -> list[str]:
        """Return the kinds that the configuration class lists, by the numbers in the config."""
        numbers: dict[str, int] = {"sliding_window": window}
        for key in _PERIODS:
            if keys.has(key):
                numbers[key] = min(keys.number(key), count + 1)
        dense = "first_k_dense_replace"
        if keys.has(dense):
            numbers[dense] = min(keys.number(dense, least=0), count)
        return keys.layer_kinds(count, **numbers)


_PERIODS = (
    *("sliding_window_pattern", "prefix_dense_sliding_window_pattern"),
    "global_attn_every_n_layers",
)
"""Keys of a period of layers; one layer of a period has full attention."""


def _alternating(_keys: ConfigKeys, count: int) -> list[str]:
    return ["attention" if i % 2 else "sliding" for i in range(count)]


def _from_layer(keys: ConfigKeys, count: int) -> list[str]:
    """Return the kinds of Qwen2 and Qwen3: windows from layer ``max_window_layers`` on."""
    start = keys.number("max_window_layers", least=0)
    return ["sliding" if i >= start else "attention" for i in range(count)]


def _without_rope(keys: ConfigKeys, count: int) -> list[str]:
    """Return the kinds of SmolLM3: windows, if any, in layers without rotary embeddings."""
    if not keys.config.get("use_sliding_window", False):
        return ["attention"] * count
    if keys.has("no_rope_layers"):
        roped = keys.sequence("no_rope_layers", count)
    else:
        period = keys.number("no_rope_layer_interval")
        roped = [(i + 1) % period for i in range(count)]
    return ["attention" if rope else "sliding" for rope in roped]


def _gpt_oss(keys: ConfigKeys, types: Types) -> Layers:
    """GPT-OSS: vLLM has windows in every even layer, whatever the config lists."""
    count = keys.number("num_hidden_layers")
    if keys.listed_kinds(count) not in (None, _alternating(keys, count)):
        problem = ": windows stand in other layers than 0, 2, 4, ..., where vLLM has them"
        raise keys.fault("layer_types", problem)
    return Gqa(windows=True, kinds=_alternating)(keys, types)


def _chatglm(keys: ConfigKeys, types: Types) -> Layers:
    """ChatGLM: grouped queries only if ``multi_query_attention`` says so."""
    grouped = keys.config.get("multi_query_attention", False)
    kv_heads = keys.number("multi_query_group_num", 1) if grouped else None
    form = replace(_IGNORING, names={"num_hidden_layers": "num_layers"})
    return form(_with_kv_heads(keys, kv_heads), types)


def _falcon(keys: ConfigKeys, types: Types) -> Layers:
    """Falcon: one head with keys, unless the config has the new form."""
    keys = keys.renamed({"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"})
    kv_heads = 1 if keys.config.get("multi_query", True) else None
    if keys.config.get("new_decoder_architecture", False):
        heads = keys.number("num_attention_heads")
        kv_heads = keys.number(("num_kv_heads", "n_head_kv"), derived=heads)
    return _IGNORING(_with_kv_heads(keys, kv_heads), types)


def _gpt_bigcode(keys: ConfigKeys, types: Types) -> Layers:
    """GPT BigCode: one head with keys, unless ``multi_query`` is false."""
    kv_heads = 1 if keys.config.get("multi_query", True) else None
    return Gqa(sized=False, names=_GPT2)(_with_kv_heads(keys, kv_heads), types)


def _step3(keys: ConfigKeys, types: Types) -> Layers:
    """Step 3: queries are made of latents; one head has keys, which every rank holds."""
    if keys.number("num_attention_groups", 1) != 1:
        raise keys.wrong("num_attention_groups", keys.config["num_attention_groups"], "1")
    return Gqa(by_layer=False)(_with_kv_heads(keys, 1), types)


def _dbrx(keys: ConfigKeys, types: Types) -> Layers:
    """DBRX: the number of heads with keys stands in ``attn_config``."""
    names = {
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "hidden_size": "d_model",
    }
    kv_heads = keys.part("attn_config").number("kv_n_heads", 1)
    return replace(_IGNORING, names=names)(_with_kv_heads(keys, kv_heads), types)


def _with_kv_heads(keys: ConfigKeys, kv_heads: int | None) -> ConfigKeys:
    return keys.put("num_key_value_heads", kv_heads)


def _gemma3n(keys: ConfigKeys, types: Types) -> Layers:
    """Gemma 3n: the last layers read the caches of earlier layers, and have no caches."""
    return _without_shared(Gqa(windows=True, listed=True)(keys, types), keys)


def _gemma4(keys: ConfigKeys, types: Types) -> Layers:
    """Gemma 4: the same as Gemma 3n, but full layers have heads of their own size and number.

    Later checkpoints have size and number in ``per_layer_config``, layer by layer.
    """
    form, own = Gqa(windows=True, listed=True), keys.part("per_layer_config")
    keys = keys.put("per_layer_config", None)
    kinds, window_tokens = form.layer_windows(keys)
    kinds = [*kinds[:-1], "attention"]  # as the configuration class has it
    kv_heads, head_dim = form.shape(keys)
    layers: Layers = []
    for index, kind in enumerate(kinds):
        heads, dim, window = kv_heads, head_dim, window_tokens
        if kind == "attention":
            window = 0
            if not own.config:
                dim = keys.number("global_head_dim", 512)
                if keys.config.get("attention_k_eq_v", False):
                    heads = keys.number("num_global_key_value_heads", kv_heads)
        layer_keys = own.part(str(index))
        heads, dim = (
            layer_keys.number("num_key_value_heads", heads),
            layer_keys.number("head_dim", dim),
        )
        layers.append((replace(types.attention(heads, dim), layer=index, window_tokens=window),))
    return _without_shared(layers, keys, kinds)


def _without_shared(layers: Layers, keys: ConfigKeys, kinds: list[str] | None = None) -> Layers:
    """Return the layers without the caches of the last layers, which read earlier layers' caches.

    Raises `LayoutFormError`.
    """
    shared = keys.number("num_kv_shared_layers", least=0)
    kept = len(layers) - shared
    if shared and (kept < 2 or (kinds and not set(kinds[kept:]) <= set(kinds[:kept]))):
        wanted = f"less than the {len(layers)} layers that it is among"
        raise keys.wrong("num_kv_shared_layers", shared, wanted)
    return [*layers[:kept], *((),) * shared]


def _llama4(keys: ConfigKeys, types: Types) -> Layers:
    """Llama 4: attention in chunks, whose layers keep all tokens if vLLM is told so."""
    if keys.has("layer_types"):
        keys.sequence("layer_types", keys.number("num_hidden_layers"))
    return Gqa()(keys.put("layer_types", None), types)


def _mimo_v2(keys: ConfigKeys, types: Types) -> Layers:
    """MiMo-V2: layers with windows have other heads (number, size), and values another size."""
    pattern = keys.sequence("hybrid_layer_pattern", keys.number("num_hidden_layers"), (0, 1))
    attention = sliding = _mimo_v2_layer(keys, types, "")
    if 1 in pattern:
        window = keys.number(("sliding_window_size", "sliding_window"), least=2)
        sliding = replace(_mimo_v2_layer(keys, types, "swa_"), window_tokens=window - 1)
    kinds = ["sliding" if windowed else "attention" for windowed in pattern]
    return layers_by_kind(keys, kinds, attention, sliding=sliding)


def _mimo_v2_layer(keys: ConfigKeys, types: Types, prefix: str) -> AttentionSpec:
    """Return a layer by the keys that begin with ``prefix``."""
    heads = keys.number(f"{prefix}num_attention_heads")
    kv_heads = keys.number(f"{prefix}num_key_value_heads")
    if heads % kv_heads:
        wanted = f"a divisor of {prefix}num_attention_heads, {heads}"
        raise keys.wrong(f"{prefix}num_key_value_heads", kv_heads, wanted)
    head_dim = keys.number(f"{prefix}head_dim")
    value_dim = keys.number(f"{prefix}v_head_dim", head_dim)
    attention = types.attention(kv_heads, head_dim)
    return attention if value_dim == head_dim else replace(attention, value_dim=value_dim)


def _step3p5(keys: ConfigKeys, types: Types) -> Layers:
    """Step 3.5 and 3.7: one kind of layers may have other heads (``attention_other_setting``)."""
    count = keys.number("num_hidden_layers")
    listed = keys.config.get("layer_types") or None
    if isinstance(listed, list | tuple):  # entries of draft layers follow
        listed = listed[:count]
        keys = keys.put("layer_types", listed)
    keys = keys.renamed({"num_key_value_heads": "num_attention_groups"})
    form = Gqa(listed=True)
    kinds, window_tokens = form.layer_windows(keys)
    kv_heads, head_dim = form.shape(keys)
    other_keys = keys.part("attention_other_setting")
    other_kind = other_keys.text("attention_type") if other_keys.config and listed else None
    layers: Layers = []
    for index, kind in enumerate(kinds):
        heads, dim = kv_heads, head_dim
        if listed and listed[index] == other_kind:
            heads, dim = (
                other_keys.number("num_attention_groups"),
                other_keys.number("head_dim", dim),
            )
        window = window_tokens if kind == "sliding" else 0
        layers.append((replace(types.attention(heads, dim), layer=index, window_tokens=window),))
    return layers


def _nemotron_nas(keys: ConfigKeys, types: Types) -> Layers:
    """Llama-Nemotron: a block has attention with groups of queries of its own size, or none."""
    heads = keys.number("num_attention_heads")
    layers: Layers = []
    for index, block in enumerate(keys.sequence("block_configs", keys.number("num_hidden_layers"))):
        block_keys = ConfigKeys(block, f"{keys.path}block_configs[{index}].", keys.readings)
        attention = block_keys.part("attention")
        if attention.config.get("no_op"):
            layers.append(())
            continue
        if attention.config.get("replace_with_linear"):
            raise attention.fault("replace_with_linear", " is nothing that vLLM knows")
        group = attention.number("n_heads_in_group")
        if heads % group:
            wanted = f"a divisor of num_attention_heads, {heads}"
            raise attention.wrong("n_heads_in_group", group, wanted)
        spec = types.attention(*Gqa().shape(_with_kv_heads(keys, heads // group)))
        layers.append((replace(spec, layer=index),))
    return layers


def _flint(keys: ConfigKeys, types: Types) -> Layers:
    """Flint: windows where ``layer_types`` lists them, and a switch that turns all of them off."""
    if keys.config.get("use_sliding_window", True) is False:
        keys = keys.put("sliding_window", 0, "use_sliding_window")
    full = Gqa(windows=True, kinds=lambda _, count: ["attention"] * count)
    return full(keys, types)


_GPT2 = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "hidden_size": "n_embd"}
_IGNORING = Gqa(by_layer=False, sized=False)
_QWEN2 = Gqa(sized=False, windows=True, kinds=_from_layer, gate="use_sliding_window", uniform=True)
_QWEN3 = replace(_QWEN2, sized=True)


def _types(form: Reader, names: str) -> ModelTable:
    return dict.fromkeys(names.split(), form)


MODELS: ModelTable = {
    **_types(
        Gqa(),
        "apertus arcee aria_text ernie4_5 flex_olmo glm granite hunyuan_v1_dense "
        "hunyuan_v1_moe internlm3 iquestcoder jais2 llama ministral3 olmo olmo2 paddleocr_vl_text "
        "phi phi3 seed_oss starcoder2 telechat3",
    ),
    **_types(Gqa(windows=True), "ministral mistral"),
    **_types(
        Gqa(windows=True, listed=True),
        "afmoe cwm exaone4 exaone_moe gemma2 gemma3_text granite_swa kolibri1 laguna mellum olmo3 "
        "vaultgemma",
    ),
    **_types(Gqa(windows=True, listed=True, extra=1), "cohere2 cohere2_moe"),
    **_types(Gqa(sized=False), "granitemoe granitemoeshared"),
    **_types(
        Gqa(by_layer=False),
        "bailing_moe cohere ernie4_5_moe ernie4_5_vl_moe_text gemma glm4 glm4_moe glm4v_moe_text "
        "glm4v_text glm_ocr_text hy_v3 hyperclovax minimax_m2 mixtral nemotron phi3_v phi4mm "
        "phimoe qwen3_omni_moe_text qwen3_vl_moe_text qwen3_vl_text solar",
    ),
    **_types(_IGNORING, "deepseek internlm2 minicpm olmoe orion stablelm"),
    **_types(_QWEN2, "dots_ocr mimo qwen2 qwen2_5_omni_text qwen2_5_vl_text qwen2_vl_text"),
    **_types(_QWEN3, "minicpmo minicpmv qwen3"),
    **_types(_mimo_v2, "mimo_v2 mimo_v2_flash"),
    **_types(_step3p5, "step3p5 step3p7_text"),
    **_types(_gemma4, "gemma4_text gemma4_unified_text"),
    **_types(replace(_IGNORING, grouped=False, names=_GPT2), "gpt2 gptj"),
    "beam": Gqa(windows=True),
    "bloom": replace(_IGNORING, grouped=False, names={**_GPT2, "hidden_size": "n_embed"}),
    "chatglm": _chatglm,
    "dbrx": _dbrx,
    "exaone": Gqa(by_layer=False, names={"num_hidden_layers": "num_layers"}),
    "falcon": _falcon,
    "flint": _flint,
    "gemma3n_text": _gemma3n,
    "gpt_bigcode": _gpt_bigcode,
    "gpt_neox": Gqa(grouped=False),
    "gpt_oss": _gpt_oss,
    "granitemoe_swa": Gqa(sized=False, windows=True, listed=True),
    "llama4_text": _llama4,
    "nemotron-nas": _nemotron_nas,
    "opt": replace(_IGNORING, grouped=False),
    "qwen2_moe": replace(_IGNORING, windows=True, listed=True, gate="use_sliding_window"),
    "qwen3_moe": Gqa(by_layer=False, windows=True, gate="use_sliding_window"),
    "smollm3": Gqa(windows=True, kinds=_without_rope),
    "step3_text": _step3,
}
