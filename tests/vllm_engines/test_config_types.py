"""Types of KV out of configs, by vLLM's own functions and by ours."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from vllm_harness.config_cases import CASES

SCRIPT = Path(__file__).parents[1] / "vllm_harness" / "config_types.py"


@pytest.mark.timeout(600)
def test_vllm_chooses_the_types_that_the_cases_say(vllm_python: Path, tmp_path: Path) -> None:
    folders = []
    for index, case in enumerate(CASES):
        folder = tmp_path / str(index)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(case.config))
        if case.quant_config is not None:
            (folder / "hf_quant_config.json").write_text(json.dumps(case.quant_config))
        folders.append(str(folder))
    env = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    done = subprocess.run(
        [str(vllm_python), str(SCRIPT), *folders],
        env=env,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for case, found in zip(CASES, said, strict=True):
        if case.refused:
            # It refuses too, or takes no heed of what is declared, or has a type of its own.
            assert "refused" in found or found["kv"] in ("bfloat16", "uint8"), case.name
        else:
            wanted = {"kv": case.kv, "method": case.method, "model_type": case.model_type}
            assert found == wanted, case.name
