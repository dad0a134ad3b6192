"""`./run test` stops where a check fails."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("ruff", "mypy", "buf", "python")


def checksum() -> str:
    """As the script takes it, of what is to be installed."""
    locks = (ROOT / "docker" / "locked" / f"{name}.txt" for name in ("setup", "cpu", "cuda"))
    files = (ROOT / "pyproject.toml", ROOT / "docker" / "install", *locks)
    whole = b"".join(one.read_bytes() for one in files)
    return subprocess.run(["cksum"], input=whole, capture_output=True, check=True).stdout.decode()  # noqa: S607


@pytest.mark.parametrize("fails", [*TOOLS, None])
def test_a_check_that_fails_ends_it(fails: str | None, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / ".restow-setup").write_text(checksum())
    for tool in TOOLS:
        path = tmp_path / "bin" / tool
        path.write_text(f"#!/bin/sh\necho {tool} ran\nexit {int(tool == fails)}\n")
        path.chmod(0o755)
    done = subprocess.run(
        [ROOT / "run", "test", "--", "tests"],
        env={**os.environ, "RESTOW_VENV": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode != 0) == (fails is not None), done.stderr
    ran = [line.split()[0] for line in done.stdout.splitlines()]
    assert ran[-1] == (fails or TOOLS[-1])
    assert ("FAILED" in done.stderr) == (fails is not None)
    assert "s  setting up" in done.stderr
