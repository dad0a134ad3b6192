"""The word for what an engine of vLLM computes states with, by its own configuration objects."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from vllm_harness.programs import answers
from vllm_harness.tiny_models import tiny_model

HUB_NAME = "somebody/something"
pytestmark = pytest.mark.timeout(600)


def with_config(model: Path, folder: Path, **changed: Any) -> str:
    """Write the model's config with other values into a folder of its own."""
    folder.mkdir()
    config = json.loads((model / "config.json").read_text()) | changed
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def in_hub_cache(model: Path, cache: Path) -> None:
    """Lay a checkpoint into a cache of the hub, as `snapshot_download` does."""
    repository, commit = cache / "hub" / f"models--{HUB_NAME.replace('/', '--')}", "c" * 40
    shutil.copytree(model, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)


def words(python: Path, tmp_path: Path, settings: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Return the revision of an engine with each of the settings."""
    asked = "".join(json.dumps(one) + "\n" for one in settings.values())
    hub = {"HF_HOME": str(tmp_path / "cache")}
    lines = answers(python, "revisions_main.py", told=asked, **hub)
    for name, (before, after) in zip(settings, lines, strict=True):
        assert before == after or before == "ENGINE_UNSUPPORTED", f"{name}: {after}"
    return {name: before for name, (before, _) in zip(settings, lines, strict=True)}


def test_a_word_tells_what_states_are_computed_with_and_nothing_else(
    vllm_python: Path, tmp_path: Path
) -> None:
    model = tiny_model("llama", tmp_path / "model")
    in_hub_cache(model, tmp_path / "cache")
    base = {"model": str(model), "max_model_len": 128}
    rope = {"rope_type": "default", "rope_theta": 5e4}
    yarn = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 1e4,
    }
    own = json.loads((model / "config.json").read_text())
    alike = {
        "itself": base,
        "by its name on the hub": base | {"model": HUB_NAME},
        "in another folder": base | {"model": str(shutil.copytree(model, tmp_path / "copy"))},
        "shorter prompts": base | {"max_model_len": 64},
        "another TP": base | {"tensor_parallel_size": 2},
        "another type": base | {"dtype": "float32"},
        "another seed and name": base | {"seed": 7, "served_model_name": "n"},
        "what the file says already": base
        | {"hf_overrides": {"rms_norm_eps": own["rms_norm_eps"]}},
        "another end token": base | {"hf_overrides": {"eos_token_id": 3}},
        "the same config elsewhere": base
        | {"hf_config_path": with_config(model, tmp_path / "same", transformers_version="4.0")},
    }
    others = {
        "theta": [
            base | {"hf_overrides": {"rope_parameters": rope}},
            base | {"hf_overrides": "theta"},
        ],
        "yarn": [base | {"hf_overrides": {"rope_parameters": yarn}}],
        "eps": [
            base | {"hf_overrides": {"rms_norm_eps": 0.25}},
            base | {"hf_config_path": with_config(model, tmp_path / "eps", rms_norm_eps=0.25)},
        ],
    }
    odd = {"odd": base | {"hf_overrides": "odd"}}
    flat = {f"{name} {i}": one for name, some in others.items() for i, one in enumerate(some)}
    found = words(vllm_python, tmp_path, alike | flat | odd)
    assert found.pop("odd") == "ENGINE_UNSUPPORTED"
    assert len({found[name] for name in alike}) == 1, found
    by_kind = {
        name: {found[f"{name} {i}"] for i in range(len(some))} for name, some in others.items()
    }
    assert all(len(some) == 1 for some in by_kind.values()), by_kind
    assert len({found["itself"], *(word for some in by_kind.values() for word in some)}) == 4
