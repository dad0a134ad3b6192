"""`./run test` stops where a check fails; `./run nightly` runs the rest, and fails at its end."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("ruff", "mypy", "lint-imports", "buf", "python")


def checksum() -> str:
    """Return the checksum of what is to be installed, as the script computes it."""
    locks = (ROOT / "docker" / "locked" / f"{name}.txt" for name in ("setup", "cpu", "cuda"))
    files = (ROOT / "pyproject.toml", ROOT / "docker" / "install", *locks)
    whole = b"".join(one.read_bytes() for one in files)
    return subprocess.run(["cksum"], input=whole, capture_output=True, check=True).stdout.decode()  # noqa: S607


def run(venv: Path, *arguments: str, fails: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run the script in a venv of tools that only say that they ran; the tool ``fails`` fails."""
    (venv / "bin").mkdir()
    (venv / ".restow-setup").write_text(checksum())
    for tool in TOOLS:
        path = venv / "bin" / tool
        path.write_text(f"#!/bin/sh\necho {tool} ran $*\nexit {int(tool == fails)}\n")
        path.chmod(0o755)
    return subprocess.run(
        [ROOT / "run", *arguments],
        env={**os.environ, "RESTOW_VENV": str(venv), "RESTOW_CONTAINERS": "0"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("fails", [*TOOLS, None])
def test_a_check_that_fails_ends_it(fails: str | None, tmp_path: Path) -> None:
    done = run(tmp_path, "test", "--", "tests", fails=fails)
    assert (done.returncode != 0) == (fails is not None), done.stderr
    ran = [line.split()[0] for line in done.stdout.splitlines()]
    assert ran[-1] == (fails or TOOLS[-1])
    assert ("FAILED" in done.stderr) == (fails is not None)
    assert "s  setting up" in done.stderr


@pytest.mark.parametrize("fails", [True, False])
def test_parts_of_all_go_on_behind_one_that_fails(fails: bool, tmp_path: Path) -> None:
    ways, _ = (ROOT / "run").read_text().split("\nsetup() {")
    first = "first() { false; echo went on; }" if fails else "first() { leave_out third; }"
    parts = "part_of_all one first; part_of_all two echo second"
    script = tmp_path / "run"
    script.write_text(f"{ways}\n{first}\n{parts}\n")
    bash = shutil.which("bash") or "bash"
    done = subprocess.run([bash, script], capture_output=True, text=True, check=False)
    assert done.returncode == int(fails), done.stderr
    assert done.stdout == "second\n"
    assert ("run: FAILED    one" in done.stderr) == fails
    assert ("run: LEFT OUT  third" in done.stderr) != fails
    assert "s  two" in done.stderr


@pytest.mark.parametrize("fails", [True, False])
def test_what_is_begun_beside_the_others_ends_with_the_run(fails: bool, tmp_path: Path) -> None:
    ways, _ = (ROOT / "run").read_text().split("\nsetup() {")
    asleep = f"slow() {{ touch {tmp_path}/began; sleep 60; leave_out never; }}"
    failing = f"{asleep}\nbegin one slow; until [ -e {tmp_path}/began ]; do :; done; part two false"
    quick = "quick() { echo first; leave_out third; }"
    good = f"{quick}\nbegin one quick; part two echo second; part one finish"
    script = tmp_path / "run"
    script.write_text(f"{ways}\n{failing if fails else good}\n")
    bash = shutil.which("bash") or "bash"
    done = subprocess.run([bash, script], capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == int(fails), done.stderr
    assert done.stdout.startswith("" if fails else "second\nfirst\n")
    assert ("run: FAILED    two" in done.stderr) == fails
    assert ("run: LEFT OUT  third" in done.stderr) != fails
