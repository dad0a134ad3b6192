"""Which weights an engine of vLLM says that it has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from restow.agents.engines.recall.model import checkpoint_folder
from restow.agents.engines.vllm.model_revision import weights_revision


def revision(
    model: str = str(checkpoint_folder()), named: str = "", load_format: str = "auto", **more: Any
) -> str:
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(
            **{"model": model, "revision": None, "dtype": "torch.bfloat16", "hf_overrides": {}}
            | {"hf_text_config": SimpleNamespace(), "max_model_len": 8192}
            | more
        ),
        load_config=SimpleNamespace(load_format=load_format, download_dir=None),
        parallel_config=SimpleNamespace(tensor_parallel_size=2),
        device_config=SimpleNamespace(device_type="cpu"),
    )
    return weights_revision(config, named)


def test_what_overrides_a_checkpoints_config_makes_another_model_of_it() -> None:
    theta = {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}
    turned = {"rope_parameters": dict(reversed(theta["rope_parameters"].items()))}
    other = {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}
    assert len({revision(hf_overrides=one) for one in ({}, theta, other, len)}) == 4
    assert revision(hf_overrides=theta) == revision(hf_overrides=turned)
    assert revision(load_format="dummy") != revision(load_format="dummy", hf_overrides=theta)


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
