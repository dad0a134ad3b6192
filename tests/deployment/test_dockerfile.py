"""What hadolint says of the images' Dockerfile."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HADOLINT = shutil.which("hadolint", path=Path(sys.executable).parent)


@pytest.mark.skipif(HADOLINT is None, reason="hadolint has no package for this machine")
def test_hadolint_finds_nothing(tmp_path: Path) -> None:
    assert HADOLINT is not None
    bad = tmp_path / "Dockerfile"
    bad.write_text("FROM python:latest\nRUN cd /tmp && pip install restow\n")
    for file, finds in ((bad, True), (ROOT / "docker" / "Dockerfile", False)):
        found = subprocess.run([HADOLINT, file], capture_output=True, text=True, check=False)
        assert (found.returncode != 0) == finds, found.stdout
