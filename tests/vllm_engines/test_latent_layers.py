"""What latent models keep, against what the same configs give in vLLM's own models."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from restow.broker.families import AttentionSpec, EngineSettings, IndexerSpec, LayerSpec, MlaSpec
from restow.broker.families.build import layer_pages
from restow.broker.families.hf import model_from_hf_config
from vllm_harness.engine import ENVIRONMENT
from vllm_harness.latent_configs import CONFIGS

pytestmark = pytest.mark.timeout(1800)
TPS = (1, 4, 16)
HEADS = {"MiniCPM3-4B": 40, "GLM-4.7-Flash": 20}
"""Attention heads, where not all TP sizes divide them."""
Caches = dict[tuple[str, int], dict[str, dict[str, Any]]]
UNBUILT = ("HY-V4", "Step3")
"""Of these vLLM needs more than their language model's config, or a GPU."""
MODELS = {name: config for name, config in CONFIGS.items() if name not in UNBUILT}
SCRIPT = Path(__file__).parents[1] / "vllm_harness" / "built_layers.py"


@pytest.fixture(scope="module")
def built(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Caches:
    """Return the caches that vLLM's layers ask for, by model and TP.

    All are of one process, since vLLM starts slowly.
    """
    folder = tmp_path_factory.mktemp("models")
    for name, whole in MODELS.items():
        # Towers of vision can't be built without weights; the language model is described whole.
        config = whole.get("text_config") or whole.get("language_config") or whole
        # The weights' type needs processors of its own, and says nothing of KV here.
        plain = {key: value for key, value in config.items() if key != "quantization_config"}
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(plain))
    run = subprocess.run(
        [vllm_python, SCRIPT, folder, ",".join(map(str, TPS))],
        env={**os.environ, **ENVIRONMENT, "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    print(run.stderr[-20_000:])  # of models that could not be built
    lines = (json.loads(line) for line in run.stdout.splitlines() if line.startswith("["))
    return {(name, tp): caches for name, tp, caches in lines}


@pytest.mark.parametrize("name", MODELS)
def test_the_caches_are_those_of_vllms_model(built: Caches, name: str) -> None:
    model = model_from_hf_config(MODELS[name])
    tps = [tp for tp in TPS if HEADS.get(name, tp) % tp == 0]
    assert [tp for one, tp in built if one == name] == tps
    for tp in tps:
        caches = built[name, tp]
        found = {_place(key): value for key, value in caches.items()}
        assert len(found) == len(caches)
        assert found == {
            (spec.layer, isinstance(spec, IndexerSpec)): _as_vllm(spec, tp) for spec in model.layers
        }


def _place(name: str) -> tuple[int, bool]:
    """Return the number of the layer, and whether the cache is an indexer's.

    Several attentions of a layer are numbered on.
    """
    numbers = [int(word) for word in name.split(".") if word.isdigit()]
    number = numbers[0] if len(numbers) == 1 else 2 * numbers[0] + numbers[1]
    return number, ".indexer." in name


def _as_vllm(spec: LayerSpec, tp: int) -> dict[str, Any]:
    settings = EngineSettings(tp, page_tokens=64)
    (region,) = layer_pages(spec, settings, tp - 1).regions
    common = {"token_bytes": region.page_stride_bytes / 64}
    match spec:
        case AttentionSpec():
            heads = max(spec.kv_heads // tp, 1)
            form = {"kind": "FullAttentionSpec", "role": "", "dtype": "bfloat16", "heads": heads}
        case MlaSpec():
            form = {"kind": "MLAAttentionSpec", "role": "sparse", "dtype": "bfloat16", "heads": 1}
        case IndexerSpec():
            form = {"kind": "MLAAttentionSpec", "role": "indexer", "dtype": "uint8", "heads": 1}
        case _:
            raise NotImplementedError(spec)
    return {**form, **common}
