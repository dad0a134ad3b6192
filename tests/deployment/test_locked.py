"""What the images install: all that the package asks for, each with a hash, nothing else."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOCKED = ROOT / "docker" / "locked"
TARGETS = ("broker", "agent", "agent-cuda")
LINE = re.compile(r"(\S+)==(\S+) --hash=sha256:[0-9a-f]{64}")


def versions(target: str) -> dict[str, str]:
    found = {}
    for line in (LOCKED / f"{target}.txt").read_text().splitlines()[1:]:
        whole = LINE.fullmatch(line)
        assert whole is not None, line
        found[whole[1]] = whole[2]
    return found


def test_nothing_is_missing() -> None:
    """Neither a requirement of the package nor a version of constraints.txt has changed since."""
    command = [sys.executable, str(ROOT / "docker" / "lock"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("target", TARGETS)
def test_each_has_a_version_and_a_hash(target: str) -> None:
    assert len(versions(target)) > 15


def test_what_only_some_have() -> None:
    broker, agent, cuda = (versions(target) for target in TARGETS)
    assert "torch" not in broker
    assert agent["torch"].endswith("+cpu")
    assert "triton" not in agent
    assert not cuda["torch"].endswith("+cpu")
    assert "triton" in cuda
    assert {"nixl", "nixl-cu12"} <= agent.keys() & cuda.keys()
    assert {name: agent[name] for name in broker} == broker


def test_the_images_install_nothing_else() -> None:
    text = (ROOT / "docker" / "Dockerfile").read_text().replace("\\\n", "")
    installs = re.findall(r"pip install .*", text)
    assert len(installs) == 1 + len(TARGETS)
    for one in installs:
        assert "--require-hashes --no-deps" in one or one.startswith("pip install --no-deps"), one
