"""What is installed from elsewhere is named by hash: packages, and the images that ours are of."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOCKS = sorted((ROOT / "docker" / "locked").glob("*.txt"))
LINE = re.compile(r"[a-z0-9.-]+==\S+( ; [^#]+?)?( --hash=sha256:[0-9a-f]{64})+")
OF_THE_CHECKOUT = re.compile(
    r"--no-deps --no-build-isolation (--prefix /package \.|-e (\.|\"\$root\"))"
)
OPEN = ("docker/kubernetes/Dockerfile",)
"""An example that no script builds: it takes what vLLM's own image has, as it is there."""
OTHERS = re.compile(
    r"\b(pipx|npm|npx|cargo|go|conda|uv pip|gem) install\b|\b(curl|wget) [^|\n]*\| *(ba)?sh"
)


def scripts() -> list[Path]:
    """Return every tracked file that is run by a shell or by Docker."""
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],  # noqa: S607
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    paths = [ROOT / name for name in tracked.stdout.split("\n") if name not in ("", *OPEN)]
    return [
        path
        for path in paths
        if path.is_file()
        and (path.name == "Dockerfile" or path.read_bytes()[:40].split(b"\n")[0].endswith(b"bash"))
    ]


def refused(text: str) -> list[str]:
    """Return the commands of a script that install files without a hash."""
    lines = [
        one for one in text.replace("\\\n", " ").splitlines() if not one.lstrip().startswith("#")
    ]
    installs = [one for one in lines if re.search(r"\bpip3?\"? install\b", one)]
    bare = [
        one
        for one in installs
        if "--require-hashes" not in one and OF_THE_CHECKOUT.search(one) is None
    ]
    return bare + [one for one in lines if OTHERS.search(one)]


def test_the_scripts_are_found() -> None:
    names = {str(path.relative_to(ROOT)) for path in scripts()}
    assert {"run", ".ci/run", "docker/install", "docker/Dockerfile", "proto/generate"} <= names


@pytest.mark.parametrize("path", scripts(), ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_is_installed_without_a_hash(path: Path) -> None:
    assert refused(path.read_text()) == []


@pytest.mark.parametrize(
    "line",
    [
        "pip install -q torch",
        '"$venv/bin/pip" install -c constraints.txt -e .',
        "pip install --no-deps .",
        "npm install left-pad",
        "curl -s example.org/install | sh",
    ],
)
def test_what_has_no_hash_is_seen(line: str) -> None:
    assert refused(f"set -e\n{line}\n")


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.stem)
def test_every_line_of_a_lock_has_a_version_and_a_hash(lock: Path) -> None:
    head, *lines = lock.read_text().splitlines()
    assert head.startswith("# Written by docker/lock")
    assert [line for line in lines if LINE.fullmatch(line) is None] == []
    assert lines


def test_locks_have_what_is_asked_for() -> None:
    # No requirement of the package and no version of constraints.txt has changed since the lock.
    command = [sys.executable, str(ROOT / "docker" / "lock"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_lock_that_is_installed_is_there_and_no_other() -> None:
    used = {"cpu", "cuda"}
    for path in scripts():
        for words in re.findall(
            r"docker/install\" [^>\n]+|docker/install [^>\n]+", path.read_text()
        ):
            names = "setup|vllm-newest|vllm|fuzz|stubs|routers|dynamo|sglang"
            used.update(re.findall(rf" ({names})\b", words))
        used.update(re.findall(r"docker/locked/([a-z-]+)\.txt \./", path.read_text()))
    assert used == {path.stem for path in LOCKS}


def test_images_of_others_are_named_by_digest_everywhere_alike() -> None:
    docker = ROOT / "docker"
    (base,) = re.findall(r"^ARG BASE=(.+)$", (docker / "Dockerfile").read_text(), re.MULTILINE)
    files = (docker / "compose.yaml", docker / "daemons.yaml")
    named = [
        base,
        *(one for path in files for one in re.findall(r":-([\w./-]+:[^}]+)}", path.read_text())),
    ]
    assert [one for one in named if not re.fullmatch(r"\S+@sha256:[0-9a-f]{64}", one)] == []
    assert {one for one in named if one.startswith("python:")} == {base}
    froms = re.findall(
        r"^FROM (\S+)(?: AS (\S+))?", (docker / "Dockerfile").read_text(), re.MULTILINE
    )
    stages = {name for _, name in froms}
    assert {image for image, _ in froms} <= {"${BASE}", *stages}


def test_the_install_says_what_pip_says_of_torch(tmp_path: Path) -> None:
    # A file with another hash is reported as that, and not as a missing file.
    (line,) = (ROOT / "docker" / "locked" / "cpu.txt").read_text().splitlines()[1:]
    version = line.split()[0].partition("==")[2]
    (tmp_path / f"torch-{version}-py3-none-any.whl").write_bytes(b"not it")
    known = os.environ | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    known |= {"PIP_TARGET": str(tmp_path / "installed")}
    command = [str(ROOT / "docker" / "install"), sys.executable, "torch"]
    done = subprocess.run(command, env=known, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "DO NOT MATCH THE HASHES" in done.stderr
