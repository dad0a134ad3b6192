"""Which weights an engine of vLLM says that it has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from restow.agents.engines.recall.model import checkpoint_folder
from restow.agents.engines.vllm.errors import EngineUnsupportedError
from restow.agents.engines.vllm.model_revision import weights_revision

OWN = {"rope_parameters": {"rope_theta": 1e4}, "eos_token_id": 2}


def revision(
    model: str = str(checkpoint_folder()), named: str = "", load_format: str = "auto", **more: Any
) -> str:
    """Return the word of an engine; configurations are merged here as vLLM does (`hf_config`)."""
    settings: dict[str, Any] = {"model": model, "revision": None, "dtype": "torch.bfloat16"}
    settings["hf_overrides"] = {}
    settings |= {
        "hf_text_config": SimpleNamespace(),
        "max_model_len": 8192,
        "config_format": "auto",
    }
    settings |= dict.fromkeys(("hf_config_path", "quantization_config", "multimodal_config"))
    settings |= {"disable_sliding_window": False}
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(**settings | more),
        load_config=SimpleNamespace(load_format=load_format, download_dir=None),
        parallel_config=SimpleNamespace(tensor_parallel_size=2),
        device_config=SimpleNamespace(device_type="cpu"),
        lora_config=None,
    )

    def read(model: Any, overridden: bool) -> dict[str, Any]:
        return OWN | model.hf_overrides if overridden else OWN

    return weights_revision(config, named, read)


def test_the_configuration_that_settings_make_of_a_checkpoints_makes_another_model_of_it() -> None:
    theta = {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}
    turned = {"rope_parameters": dict(reversed(theta["rope_parameters"].items()))}
    other = {"rope_parameters": {"rope_theta": 1e5, "rope_type": "default"}}
    assert len({revision(hf_overrides=one) for one in ({}, theta, other)}) == 3
    assert revision(hf_overrides=theta) == revision(hf_overrides=turned)
    assert revision(hf_overrides={"eos_token_id": 7}) == revision()
    assert revision(hf_overrides=OWN) == revision()
    assert revision(load_format="dummy") != revision(load_format="dummy", hf_overrides=theta)


def test_a_configuration_without_a_stable_form_is_refused_by_its_place() -> None:
    odd = {"rope_parameters": {"a": object()}}
    with pytest.raises(EngineUnsupportedError, match=r"object at rope_parameters\.a"):
        revision(hf_overrides=odd)
    assert revision(hf_overrides=odd, named="v1") == "v1"


def test_what_is_computed_by_other_settings_is_told_apart() -> None:
    def pruning(rate: float) -> SimpleNamespace:
        return SimpleNamespace(video_pruning_rate=rate, video_pruning_method="evs")

    words = [
        revision(),
        revision(quantization_config={"linear": "fp8"}),
        revision(quantization_config={"linear": "int8"}),
        revision(multimodal_config=pruning(0.5)),
        revision(multimodal_config=pruning(0.25)),
    ]
    assert len(set(words)) == len(words)
    assert revision(multimodal_config=pruning(0)) == revision()


def test_long_rope_turns_otherwise_where_longer_prompts_may_come() -> None:
    phi = SimpleNamespace(original_max_position_embeddings=4096)
    short, other, long = (
        revision(hf_text_config=phi, max_model_len=tokens) for tokens in (2048, 4096, 4097)
    )
    assert short == other != long


def test_the_operators_word_stands_for_all_of_it() -> None:
    assert revision(named="v1", hf_overrides={"a": 1}) == "v1"


def test_of_a_checkpoint_that_is_not_here_nothing_is_said() -> None:
    assert revision("no/where", hf_overrides={"a": 1}) == ""
