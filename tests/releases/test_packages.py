"""A wheel and a source distribution, installed where nothing else is, on every Python claimed.

They are built as "releasing.md" says.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from releases.trees import ROOT, version

with (ROOT / "pyproject.toml").open("rb") as file:
    CLASSIFIERS = tomllib.load(file)["project"]["classifiers"]
PYTHONS = [one.rpartition(" ")[2] for one in CLASSIFIERS if re.search(r":: 3\.\d+$", one)]
OF_PYENV = sorted(Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob("versions/*/bin"))
"""uv finds these only if they are on PATH."""
LISTENS = "restow broker listening on "


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command that has nothing of this environment; return what it said."""
    kept = {name: words for name, words in os.environ.items() if name != "PYTHONPATH"}
    kept["PATH"] = os.pathsep.join((*map(str, OF_PYENV), os.environ["PATH"]))
    return subprocess.run(command, cwd=cwd, env=kept, capture_output=True, text=True, check=False)


def said(*command: str | Path, cwd: Path) -> str:
    done = run(*command, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Build what a release has, as its page says."""
    folder = tmp_path_factory.mktemp("packages")
    text = (ROOT / "docs" / "releasing.md").read_text()
    (block,) = re.findall(r"^```bash\n(dist=.*?)^```", text, re.M | re.S)
    programs = Path(sys.executable).parent
    words = f"set -eu; export dist={folder} PATH={programs}:$PATH; {block}"
    said("bash", "-c", words, cwd=ROOT)
    return {one.suffix: one for one in folder.iterdir()}


def interpreter(python: str, folder: Path) -> str:
    """Return a Python of this version; skip the test if there is none and none can be had."""
    uv = Path(sys.executable).with_name("uv")
    found = run(uv, "python", "find", "--no-project", python, cwd=folder)
    if found.returncode:
        got = run(uv, "python", "install", "--install-dir", folder / "python", python, cwd=folder)
        if got.returncode:
            pytest.skip(f"no Python {python}, and uv gets none: {got.stderr.strip()[-200:]}")
        (path,) = (folder / "python").glob(f"cpython-{python}.*/bin/python{python}")
        return str(path)
    return found.stdout.strip()


def test_every_python_that_may_be_claimed_is() -> None:
    assert PYTHONS == ["3.11", "3.12", "3.13"]


def test_all_that_is_released_is_of_this_version(packages: dict[str, Path]) -> None:
    assert {one.name for one in packages.values()} == {
        f"restow-{version()}-py3-none-any.whl",
        f"restow-{version()}.tar.gz",
        f"restow-{version()}.tgz",
        "restow-contract.binpb",
    }
    chart = (ROOT / "docker" / "helm" / "restow" / "Chart.yaml").read_text()
    assert f'version: {version()}\nappVersion: "{version()}"' in chart
    for file in (ROOT / "docker" / "kubernetes").glob("*.yaml"):
        named = re.findall(r"image: restow-\w+:(\S+)", file.read_text())
        assert {*named} <= {version()}, file
    (newest, *_) = re.findall(r"^## \[(.+)\] - ", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest == version()


@pytest.mark.sampled
@pytest.mark.parametrize("kind", [".whl", ".gz"])
@pytest.mark.parametrize("python", PYTHONS)
def test_a_broker_serves_where_nothing_else_is_installed(
    python: str, kind: str, packages: dict[str, Path], tmp_path: Path
) -> None:
    said(interpreter(python, tmp_path), "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    programs = tmp_path / "venv" / "bin"
    said(programs / "pip", "install", "-q", packages[kind], cwd=tmp_path)
    assert said(programs / "pip", "check", cwd=tmp_path) == "No broken requirements found."
    assert said(programs / "restow", "--version", cwd=tmp_path).startswith(f"restow {version()}")
    with serving(
        [str(programs / "restow"), "serve", "--listen", "127.0.0.1:0"], tmp_path
    ) as broker:
        assert broker.stdout is not None
        line = broker.stdout.readline()
        assert line.startswith(LISTENS), line
        address = line.removeprefix(LISTENS).strip()
        assert f'"version": "{version()}' in said(
            programs / "restow", "status", "--json", "--broker", address, cwd=tmp_path
        )
        broker.send_signal(signal.SIGTERM)
        assert broker.wait(30) == 0


def serving(command: Sequence[str], folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
