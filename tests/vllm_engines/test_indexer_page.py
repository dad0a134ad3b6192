"""Where vLLM's kernel writes an indexer's keys, against where a layout says that they are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(600)
KERNELS = "vllm/models/deepseek_v32/common/kernels.py"
WRITER = Path(__file__).parents[1] / "vllm_harness" / "indexer_writer.py"


@pytest.mark.parametrize("page_tokens", [64, 16])
def test_keys_and_scales_lie_where_vllms_kernel_writes_them(
    vllm_python: Path, tmp_path: Path, page_tokens: int
) -> None:
    # Triton's interpreter runs the kernel from its source alone, because vLLM for the CPU turns
    # Triton off.
    (source,) = vllm_python.parents[1].glob(f"lib/python3*/site-packages/{KERNELS}")
    run = subprocess.run(
        [sys.executable, WRITER, source, tmp_path / "kernel.py", str(page_tokens)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.split() == ["100", "tokens"]
