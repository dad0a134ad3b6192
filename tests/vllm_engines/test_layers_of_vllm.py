"""What vLLM's own model code keeps of a config: attention, latents, recurrent states, and types.

Text parts alone: the towers beside them keep nothing that a handoff moves.
"""

from __future__ import annotations

import json
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import pytest

from restow.broker.errors import TpSizeError
from restow.broker.families import (
    AttentionSpec,
    EngineSettings,
    IndexerSpec,
    LayerSpec,
    LinearAttentionSpec,
    MlaSpec,
    RecurrentSpec,
)
from restow.broker.families.build import layer_pages
from restow.broker.families.hf import model_from_hf_config
from vllm_harness.config_cases import CASES
from vllm_harness.latent_configs import CONFIGS as LATENT
from vllm_harness.programs import answers, run_program

pytestmark = pytest.mark.timeout(1800)
FAMILIES = Path(__file__).parents[1] / "families"
ANSWERS = json.loads((FAMILIES / "attention_of_vllm.json").read_text())
HYBRIDS = json.loads((FAMILIES / "hybrid_configs.json").read_text())
TPS = (1, 2, 4, 8, 16)
NEWER = ("beam", "kolibri1")
"""Types since vLLM 0.33, the second with transformers 5.23: their answers are compared there."""


@pytest.fixture(scope="module")
def asked(vllm_python: Path) -> list[list[Any]]:
    """Return vLLM's answer for every config at every TP."""
    lines = "".join(json.dumps(config) + "\n" for config, _ in ANSWERS)
    found = answers(vllm_python, "attention_layers.py", *TPS, told=lines)
    assert len(found) == len(ANSWERS)
    return found


def test_the_answers_that_are_kept_are_vllms(asked: list[list[Any]]) -> None:
    for (config, kept), layers_of in zip(ANSWERS, asked, strict=True):
        if config["model_type"] in NEWER and isinstance(layers_of[0], str):
            continue
        if config["model_type"] == "step3p5" and "per_layer_config" in layers_of[0]:
            continue  # vLLM 0.33 leaves it to transformers, which refuses a draft's layer types
        layers = [[number, *form] for numbers, *form in kept for number in numbers]
        assert sorted(layers) == layers_of[0], config


def test_attention_heads_and_pages_are_those_of_vllm(asked: list[list[Any]]) -> None:
    compared = 0
    for (config, _), layers_of in zip(ANSWERS, asked, strict=True):
        specs = model_from_hf_config(config).layers
        for tp, layers in zip(TPS, layers_of, strict=True):
            if isinstance(layers, str):  # vLLM refuses this TP
                continue
            for spec, (number, heads, key, value, seen, dtype) in zip(specs, layers, strict=True):
                assert isinstance(spec, AttentionSpec)
                assert (spec.layer, spec.window_tokens) == (number, seen), config
                settings = EngineSettings(tp=tp, page_tokens=16)
                try:
                    (region,), shards = _pages(spec, settings)
                except TpSizeError:
                    pytest.fail(f"vLLM serves TP {tp}: {config}")
                assert [one.box[0].size for one in shards] == [heads] * 2, (config, tp)
                assert [one.box[1].size for one in shards] == [key, value], (config, tp)
                assert {one.dtype.label for one in shards} == {dtype}, (config, tp)
                assert region.page_stride_bytes == 16 * heads * (key + value) * 2
                compared += 1
    assert compared > 1000


def _pages(spec: AttentionSpec, settings: EngineSettings) -> tuple[Any, Any]:
    pages = layer_pages(spec, settings, settings.tp - 1)
    return pages.regions, pages.shards


LATENT_TPS = (1, 4, 16)
HEADS = {"MiniCPM3-4B": 40, "GLM-4.7-Flash": 20}
"""Attention heads, where not all TP sizes divide them."""
Caches = dict[tuple[str, int], dict[str, dict[str, Any]]]
UNBUILT = ("HY-V4", "Step3")
"""Of these vLLM needs more than their language model's config, or a GPU."""
MODELS = {name: config for name, config in LATENT.items() if name not in UNBUILT}


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
    done = run_program(vllm_python, "built_layers.py", folder, ",".join(map(str, LATENT_TPS)))
    print(done.stderr[-20_000:])  # of models that could not be built
    lines = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))
    return {(name, tp): caches for name, tp, caches in lines}


@pytest.mark.parametrize("name", MODELS)
def test_latent_caches_are_those_of_vllms_model(built: Caches, name: str) -> None:
    model = model_from_hf_config(MODELS[name])
    tps = [tp for tp in LATENT_TPS if HEADS.get(name, tp) % tp == 0]
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


@pytest.fixture(scope="module")
def state_shapes(vllm_python: Path) -> dict[str, Any]:
    """Return the shapes that vLLM gives, by model and TP size."""
    asked, layout = json.dumps(HYBRIDS), {"VLLM_SSM_CONV_STATE_LAYOUT": "DS"}
    found = answers(vllm_python, "state_shapes.py", told=asked, **layout)[-1]
    shapes: dict[str, Any] = found
    return shapes


@pytest.mark.parametrize("name", HYBRIDS)
def test_states_are_those_of_vllm(state_shapes: dict[str, Any], name: str) -> None:
    # The windows are ``[channel][tap]``; every rank's shape is the same.
    found = state_shapes[name]
    if "missing" in found:
        pytest.skip(f"vLLM's class of {name} does not load here: {found['missing']}")
    model = model_from_hf_config(HYBRIDS[name])
    specs = {type(spec): spec for spec in model.layers if isinstance(spec, RecurrentSpec)}
    (spec,) = specs.values()
    divided = 0
    for size, states in found.items():
        tp = int(size)
        floored = isinstance(spec, LinearAttentionSpec) and spec.heads % tp  # vLLM does not look
        if states is None or floored:
            with pytest.raises(TpSizeError):
                list(chain.from_iterable(_states(spec, tp, rank) for rank in range(tp)))
            continue
        divided += 1
        for rank in range(tp):
            assert _states(spec, tp, rank) == [list(one) for one in states[0]], (tp, rank)
        form = spec.recurrence()
        dtypes = ([form.conv_dtype] if form.conv else []) + [form.state_dtype for _ in form.states]
        assert [dtype.label for dtype in dtypes] == [
            one.removeprefix("torch.") for one in states[1]
        ]
    assert divided >= 2


def _states(spec: RecurrentSpec, tp: int, rank: int) -> list[list[int]]:
    """Return the shapes of a rank's states, as Restow has them."""
    form = spec.recurrence()
    boxes = [part.box(tp, rank) for part in form.conv]
    columns = sum(prod(span.size for span in box) for box in boxes)
    windows = [[columns, form.taps]] if form.conv else []
    return windows + [[span.size for span in part.box(tp, rank)] for part in form.states]


def test_vllm_chooses_the_types_that_the_cases_say(vllm_python: Path, tmp_path: Path) -> None:
    folders = []
    for index, case in enumerate(CASES):
        folder = tmp_path / str(index)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(case.config))
        if case.quant_config is not None:
            (folder / "hf_quant_config.json").write_text(json.dumps(case.quant_config))
        folders.append(folder)
    for case, found in zip(CASES, answers(vllm_python, "config_types.py", *folders), strict=True):
        if case.refused:
            # It refuses too, or takes no heed of what is declared, or has a type of its own.
            unread = "refused" in found or found["kv"] in ("bfloat16", "uint8")
            # vLLM 0.33 reads one more kind of file.
            assert unread or found["method"] == "modelopt_mixed", case.name
        elif not (case.since and "refused" in found):
            wanted = {"kv": case.kv, "method": case.method, "model_type": case.model_type}
            assert found == wanted, case.name
