"""Shapes and types of public hybrids' states against vLLM's own functions, at every TP it has."""

from __future__ import annotations

import json
import os
import subprocess
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import pytest

from restow.broker.errors import TpSizeError
from restow.broker.families import LinearAttentionSpec, RecurrentSpec
from restow.broker.families.hf import model_from_hf_config
from vllm_harness.engine import ENVIRONMENT, HERE

pytestmark = pytest.mark.timeout(600)

CONFIGS = json.loads((HERE.parent / "families" / "hybrid_configs.json").read_text())


@pytest.fixture(scope="module")
def of_vllm(vllm_python: Path) -> dict[str, Any]:
    """Return the shapes that vLLM gives, by model and TP size."""
    environment = {**os.environ, **ENVIRONMENT, "VLLM_LOGGING_LEVEL": "ERROR"}
    environment.pop("PYTHONSAFEPATH", None)
    told = subprocess.run(
        [vllm_python, HERE / "state_shapes.py"],
        input=json.dumps(CONFIGS),
        capture_output=True,
        text=True,
        env={**environment, "VLLM_SSM_CONV_STATE_LAYOUT": "DS"},
    )
    assert told.returncode == 0, told.stderr[-2000:]
    found: dict[str, Any] = json.loads(told.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_states_are_those_of_vllm(of_vllm: dict[str, Any], name: str) -> None:
    # The windows are ``[channel][tap]``; every rank's shape is the same.
    found = of_vllm[name]
    if "missing" in found:
        pytest.skip(f"vLLM's class of {name} does not load here: {found['missing']}")
    model = model_from_hf_config(CONFIGS[name])
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
