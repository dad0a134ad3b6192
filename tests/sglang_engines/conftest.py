"""A broker for all tests of a file, a store for each test, and SGLang's Python."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from restow.agents.store.store import Store, StoreOptions
from restow.broker.families import EngineSettings
from restow.broker.families.build import build_layout
from restow.broker.families.hf import model_from_hf_config
from restow.broker.layout import DType
from restow.broker.planner import Strategy
from restow.demo.experiment import running_broker_process
from restow.demo.recall.model import checkpoint_folder
from sglang_harness.engine import SglangEngine, sglang_engine

REVISION = "v1"
HARNESS = Path(__file__).parents[1] / "sglang_harness"
Starts = Callable[..., AbstractContextManager[SglangEngine]]


@pytest.fixture(scope="session")
def packages() -> Path:
    """Return the folder with SGLang's Python, installed the first time (``./run vllm``)."""
    found = os.environ.get("RESTOW_SGLANG_PACKAGES")
    if not found and "RESTOW_VLLM_PYTHON" not in os.environ:
        pytest.skip("NO SGLANG: these tests are run by ./run vllm, which installs its Python")
    if not found:
        setup = [str(HARNESS / "install.sh"), sys.executable]
        found = subprocess.run(setup, check=True, stdout=subprocess.PIPE, text=True).stdout.split()[
            -1
        ]
    return Path(found)


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """Return the interpreter that has vLLM."""
    found = os.environ.get("RESTOW_VLLM_PYTHON")
    if not found:
        pytest.skip("NO VLLM: these tests are run by ./run vllm, which installs it")
    return Path(found)


@pytest.fixture(scope="module")
def broker() -> Iterator[str]:
    with ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setenv("RESTOW_OFFER_S", "60")
        yield stack.enter_context(running_broker_process(Strategy.AUTO))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the models by kind: attention alone, hybrids of two groups and of one, windows."""
    made = {"hybrid": checkpoint_folder(), "one_group": checkpoint_folder(1)}
    plain = {
        "model_type": "qwen3",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_hidden_layers": 3,
        "vocab_size": 88,
        "intermediate_size": 128,
        "torch_dtype": "float32",
        "eos_token_id": 2,
    }
    windows = {
        **plain,
        "model_type": "gemma3_text",
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 33,
    }
    for name, config in (("attention", plain), ("windows", windows)):
        made[name] = tmp_path_factory.mktemp(name)
        (made[name] / "config.json").write_text(json.dumps(config))
    return made


@pytest.fixture(scope="module")
def start(
    packages: Path,
    models: dict[str, Path],
    broker: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Starts:
    """Return how to start an engine of a model, with its linker."""

    @contextmanager
    def started(kind: str, **options: Any) -> Iterator[SglangEngine]:
        options["extra"] = {"model_revision": REVISION, **options.get("extra", {})}
        folder = tmp_path_factory.mktemp("engine")
        with sglang_engine(packages, folder, models[kind], broker, **options) as engine:
            answers = engine.each("start")
            assert not any("error" in one for one in answers), answers
            yield engine

    return started


@contextmanager
def store_for(broker: str, model: Path, name: str = "store") -> Iterator[Store]:
    """Run a store for a model, made from its config as an operator makes it."""
    config = json.loads((model / "config.json").read_text())
    spec = model_from_hf_config(config, dtype=DType.FLOAT32, revision=REVISION)
    options = StoreOptions(name, broker, 64 << 20, 16)
    with Store(build_layout(spec, EngineSettings()), options) as store:
        yield store
