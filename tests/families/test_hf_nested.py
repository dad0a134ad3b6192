"""The language model inside of configs that have other parts too."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from restow.broker.errors import LayoutFormError, UnknownModelError
from restow.broker.families.hf import attention, model_from_hf_config
from restow.broker.families.hf.config import WHOLES
from restow.broker.layout import DType

TEXT = {"model_type": "qwen3_next", "num_hidden_layers": 4}
VISION = {"model_type": "siglip_vision_model", "num_hidden_layers": 27}
PARTS: dict[str, dict[str, Any]] = {
    "transformers": {"model_type": "a_vl", "text_config": TEXT, "vision_config": VISION},
    "InternVL": {"model_type": "internvl_chat", "llm_config": TEXT, "vision_config": VISION},
    "Nemotron": {"model_type": "NemotronH_Nano_VL_V2", "llm_config": TEXT},
    "DeepSeek-VL": {"model_type": "vl_v2", "language_config": TEXT, "vision_config": VISION},
    "Omni": {
        "model_type": "an_omni",
        "thinker_config": {"text_config": TEXT, "audio_config": {}},
        "talker_config": {"text_config": {"model_type": "llama"}},
    },
    "null": {"model_type": "a_vl", "text_config": None, "llm_config": TEXT},
    "the same twice": {"model_type": "a_vl", "text_config": TEXT, "llm_config": TEXT},
    "a type that only the whole has": {
        "model_type": "qwen3_next",
        "text_config": {**TEXT, "model_type": "qwen3_next"},
    },
}


@pytest.mark.parametrize("name", PARTS)
def test_the_text_part_alone_has_state(name: str) -> None:
    # So vLLM's connector, which is told `hf_text_config`, has the same name and layers.
    assert model_from_hf_config(PARTS[name]) == model_from_hf_config(TEXT)


def test_the_whole_has_the_type_where_its_part_has_none_that_is_known() -> None:
    part: dict[str, Any] = {"num_hidden_layers": 4}
    model = model_from_hf_config({"model_type": "qwen3_next", "text_config": part})
    assert model == model_from_hf_config(TEXT)
    part |= {"model_type": "qwen3_next_text"}
    model = model_from_hf_config({"model_type": "qwen3_next", "text_config": part})
    assert (model.name, model.depth) == ("qwen3_next_text", 4)


@pytest.mark.parametrize(
    ("whole", "wanted"),
    [
        ({"dtype": "float16", "text_config": {**TEXT, "dtype": "bfloat16"}}, DType.FLOAT16),
        ({"text_config": {**TEXT, "torch_dtype": "float16"}}, DType.FLOAT16),
        ({"text_config": TEXT, "vision_config": {"dtype": "float16"}}, DType.FLOAT16),
        ({"dtype": "auto", "text_config": {**TEXT, "dtype": "float16"}}, DType.FLOAT16),
        ({"text_config": {**TEXT, "dtype": "float32"}}, DType.BFLOAT16),
        ({"text_config": TEXT}, DType.BFLOAT16),
    ],
)
def test_where_the_type_is_named(whole: dict[str, Any], wanted: DType) -> None:
    # The order is that of vLLM's `ModelArchConfigConvertorBase.get_torch_dtype`.
    model = model_from_hf_config({"model_type": "a_vl", **whole})
    types = {getattr(layer, "dtype", None) for layer in model.layers} - {None}
    assert types == {wanted}


@pytest.mark.parametrize(
    ("whole", "part", "name"),
    [
        ("kimi_vl", "deepseek_v3", "deepseek_v2"),
        ("kimi_k25", "kimi_k2", "deepseek_v3"),
        ("deepseek_vl_v2", "deepseek_v2", "deepseek_v2"),
        ("step3p7", "step3p5", "step3p5"),
        ("llava", None, "llama"),
        ("gemma3", None, "gemma3_text"),
    ],
)
def test_the_name_is_that_of_vllms_class(whole: str, part: str | None, name: str) -> None:
    # The names are those of vLLM 0.32's `get_hf_text_config(...).to_dict()`.
    text = {"model_type": part, "num_hidden_layers": 2}
    assert model_from_hf_config({"model_type": whole, "text_config": text}).name == name


def test_an_unknown_part_is_named_with_the_whole() -> None:
    config = {"model_type": "a_vl", "text_config": {"model_type": "a_text"}}
    with pytest.raises(UnknownModelError, match=r"text_config.model_type 'a_text' .*'a_vl'"):
        model_from_hf_config(config)


LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "sliding_window": 16,
}
FIXED = sorted(
    name for name, whole in WHOLES.items() if whole.fixed and whole.text in attention.MODELS
)
OPEN = sorted(name for name, whole in WHOLES.items() if not (whole.fixed or whole.alone))


@pytest.mark.parametrize("model_type", OPEN)
def test_a_text_part_is_read_as_if_it_stood_alone(model_type: str) -> None:
    whole = model_from_hf_config({"model_type": model_type, "text_config": LLAMA})
    assert whole.layers == model_from_hf_config(LLAMA).layers
    assert (whole.name, whole.depth) == ("llama", 3)  # as vLLM calls it
    with pytest.raises(LayoutFormError, match="text_config"):
        model_from_hf_config({"model_type": model_type})
    with pytest.raises(UnknownModelError, match=r"text_config\.model_type 'perceptron' \(in a '"):
        model_from_hf_config(
            {"model_type": model_type, "text_config": {"model_type": "perceptron"}}
        )


@pytest.mark.parametrize("model_type", FIXED)
def test_a_part_is_read_as_the_whole_config_names_it_whatever_the_part_says(
    model_type: str,
) -> None:
    # The configuration class of the whole makes the part's, and does not ask for the part's type.
    text = {**LLAMA, "head_dim": 16, "num_kv_shared_layers": 0}
    config = CONFIG_MAPPING[model_type](text_config=deepcopy(text)).get_text_config()
    assert type(config).model_type == WHOLES[model_type].text
    whole = model_from_hf_config({"model_type": model_type, "text_config": text})
    own = {**text, "model_type": WHOLES[model_type].text}
    assert whole.layers == model_from_hf_config(own).layers
    assert whole.name == config.model_type  # as vLLM calls it
    with pytest.raises(LayoutFormError, match="text_config"):
        model_from_hf_config({"model_type": model_type})


def test_step_3_7_has_its_own_defaults_for_a_part_that_is_called_as_step_3_5() -> None:
    part = {"model_type": "step3p5", "num_hidden_layers": 2}
    model = model_from_hf_config({"model_type": "step3p7", "text_config": part})
    assert model.name == "step3p5"  # as vLLM calls it
    assert model.layers == model_from_hf_config({**part, "model_type": "step3p7_text"}).layers


def test_older_configs_have_the_text_beside_the_rest() -> None:
    text = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4}
    flat = model_from_hf_config({"model_type": "qwen2_5_vl", **text, "num_key_value_heads": 2})
    assert [one.fields()[0].shape for one in flat.layers] == [(2, 16)] * 4


@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        ("qwen3_5", "qwen3_5_text"),
        ("qwen3_5_moe", "qwen3_5_moe_text"),
        ("kimi_k3", "kimi_linear"),
    ],
)
def test_a_hybrid_part_is_read_as_if_it_stood_alone(outer: str, inner: str) -> None:
    text = {"model_type": inner, "num_hidden_layers": 5, "mamba_ssm_dtype": "float32"}
    model = model_from_hf_config({"model_type": outer, "text_config": text, "vision_config": {}})
    assert model.layers == model_from_hf_config(text).layers
    assert model.name == inner  # as vLLM calls it
    for wrong in ({}, {"text_config": None}, {"text_config": "qwen"}):
        with pytest.raises(LayoutFormError, match="text_config"):
            model_from_hf_config({"model_type": outer, **wrong})
