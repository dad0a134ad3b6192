"""The commands of docs/security.md, run as they stand there: only the broker's port is another."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.broker_process import broker_process, path_of_python
from forked.commands import restow_program

PAGE = Path(__file__).resolve().parents[2] / "docs" / "security.md"
SERVE = "restow serve --listen 0.0.0.0:7350 "

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")


def blocks() -> list[str]:
    return re.findall(r"^```bash\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def run(block: str, folder: Path, address: str = "") -> str:
    """Run a block in a folder that has the program `restow`."""
    path = f"{folder}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block],  # noqa: S607
        cwd=folder,
        env={"PATH": path, "RESTOW_BROKER": address, "COLUMNS": "100"} | path_of_python(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextlib.contextmanager
def served(block: str, folder: Path) -> Iterator[str]:
    """Serve a broker as a block starts it, on another port."""
    assert block.startswith(SERVE)
    with contextlib.chdir(folder), broker_process(*shlex.split(block.removeprefix(SERVE))) as where:
        yield where


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with restow_program(tmp_path / "restow"):
        yield tmp_path


def test_the_commands_of_the_page(folder: Path) -> None:
    authority, with_certificates, by_certificate, tokens, with_tokens, by_token = blocks()
    run(authority, folder)
    assert (folder / "ca.key").stat().st_mode & 0o077 == 0
    with served(with_certificates, folder) as address:
        assert address in run(by_certificate, folder, address)
        nobody = by_certificate.replace("operator.", "prefill-1.")
        with pytest.raises(AssertionError, match="FORBIDDEN"):
            run(nobody, folder, address)
    run(tokens, folder)
    assert (folder / "operator.token").stat().st_mode & 0o077 == 0
    with served(with_tokens, folder) as address:
        assert address in run(by_token, folder, address)
        with pytest.raises(AssertionError, match="FORBIDDEN"):
            run(by_token.replace("operator", "engine"), folder, address)
