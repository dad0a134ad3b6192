"""Releases of Restow, each built as a wheel and unpacked into a folder of its own."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RELEASED = ROOT / "proto" / "released"
OLD = "0.1"
"""The last release. `proto/released` has its commit, and the image of its contract."""


def version() -> str:
    """Return the version of this tree."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        return str(tomllib.load(file)["project"]["version"])


def commit_of(release: str) -> str:
    """Return the commit of a release; skip the test where this tree has no history of it."""
    return found((RELEASED / f"{release}.commit").read_text().split()[0])


def found(commit: str) -> str:
    """Return a commit of the past; skip the test where git does not have it."""
    if git("cat-file", "-e", f"{commit}^{{commit}}").returncode:
        pytest.skip(f"the history is not here (a shallow clone, or an archive): no {commit[:12]}")
    return commit


def git(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    command = ("git", "-C", str(ROOT), *arguments)
    return subprocess.run(command, capture_output=True, check=False)


def source(commit: str, folder: Path, *paths: str) -> Path:
    """Write the files of a commit into a folder."""
    archive = git("archive", commit, *paths)
    assert archive.returncode == 0, archive.stderr
    folder.mkdir()
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)  # noqa: S607
    return folder


def installed(tree: Path, folder: Path) -> Path:
    """Build the wheel of a source tree and unpack it, for PYTHONPATH; return the folder."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(folder / "lib")
    return folder / "lib"
