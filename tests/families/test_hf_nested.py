"""The language model inside of configs that have other parts too."""

from __future__ import annotations

from typing import Any

import pytest

from restow.broker.errors import LayoutFormError, UnknownModelError
from restow.broker.families.hf import model_from_hf_config
from restow.broker.layout import DType

TEXT = {"model_type": "qwen3_next", "num_hidden_layers": 4}
VISION = {"model_type": "siglip_vision_model", "num_hidden_layers": 27}
WHOLES: dict[str, dict[str, Any]] = {
    "transformers": {"model_type": "a_vl", "text_config": TEXT, "vision_config": VISION},
    "InternVL": {"model_type": "internvl_chat", "llm_config": TEXT, "vision_config": VISION},
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


@pytest.mark.parametrize("name", WHOLES)
def test_the_text_part_alone_has_state(name: str) -> None:
    # So vLLM's connector, which is told `hf_text_config`, has the same name and layers.
    assert model_from_hf_config(WHOLES[name]) == model_from_hf_config(TEXT)


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
    ("config", "message"),
    [
        ({"vision_config": VISION}, "vision_config is there, and no part of a language model"),
        ({"thinker_config": {"audio_config": {"a": 1}}}, "thinker_config.audio_config is there"),
        ({"text_config": {}}, "text_config: {} is not the config of a language model"),
        ({"text_config": [TEXT]}, r"text_config: \[.* is not an object"),
        ({"text_config": "llama"}, "text_config: 'llama' is not an object"),
        ({"text_config": TEXT, "llm_config": {"a": 1}}, "text_config and llm_config are two"),
        (
            {"text_config": {**TEXT, "num_hidden_layers": -1}},
            "text_config.num_hidden_layers: -1 is not",
        ),
        (
            {"text_config": {"text_config": {"text_config": {"text_config": TEXT}}}},
            "nested too deeply",
        ),
    ],
)
def test_parts_that_mean_nothing_name_their_key(config: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutFormError, match=message) as caught:
        model_from_hf_config({"model_type": "a_vl", **config})
    assert caught.value.subject["key"]


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
