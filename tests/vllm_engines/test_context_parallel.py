"""Which rank keeps which token, and at which place, against vLLM's own functions and kernel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from restow.broker.errors import LayoutFormError
from restow.broker.families import EngineSettings, MlaSpec, ModelSpec, build_layout
from restow.broker.layout import DType, check_layout
from vllm_harness.engine import ENVIRONMENT, HERE

pytestmark = pytest.mark.timeout(600)
MODEL = ModelSpec("m", tuple(MlaSpec(layer, 8, DType.BFLOAT16) for layer in range(2)))


def test_ranks_have_the_parts_of_vllms_groups(vllm_python: Path) -> None:
    """Check that vLLM and Restow refuse the same sizes, too."""
    environment = {**os.environ, **ENVIRONMENT, "VLLM_LOGGING_LEVEL": "ERROR"}
    environment.pop("PYTHONSAFEPATH", None)
    told = subprocess.run(
        [vllm_python, HERE / "context_groups.py"], capture_output=True, text=True, env=environment
    )
    assert told.returncode == 0, told.stderr[-2000:]
    found: dict[str, list[int] | None] = json.loads(told.stdout.splitlines()[-1])
    assert len([one for one in found.values() if one]) > 40
    for name, places in found.items():
        tp, pcp, dcp, pp = map(int, name.split(","))
        settings = EngineSettings(tp=tp, pcp=pcp, dcp=dcp, pp=pp)
        if places is None:
            with pytest.raises(LayoutFormError):
                settings.check()
            continue
        layout = build_layout(MODEL, settings)
        check_layout(layout)
        assert [rank.regions[0].context_part for rank in layout.ranks] == places, name


def test_tokens_lie_where_vllms_kernel_writes_them(vllm_python: Path, tmp_path: Path) -> None:
    # Triton's interpreter runs the kernel from its source alone, because vLLM for the CPU turns
    # Triton off.
    (folder,) = vllm_python.parents[1].glob("lib/python3*/site-packages/vllm/v1/worker/gpu")
    run = subprocess.run(
        [sys.executable, HERE / "slot_mapping.py", folder, tmp_path / "kernel.py"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.split() == ["16800", "tokens"]
