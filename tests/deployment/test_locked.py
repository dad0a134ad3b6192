"""What the images install: torch of their own kind, and the versions that are tested."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOCKED = ROOT / "docker" / "locked"
IMAGES = ("broker", "agent", "agent-cuda")


def versions(lock: str) -> dict[str, str]:
    lines = (LOCKED / f"{lock}.txt").read_text().splitlines()[1:]
    return dict(line.split()[0].split("==") for line in lines)


def test_what_only_some_have() -> None:
    broker, agent, cuda = (versions(target) for target in IMAGES)
    assert "torch" not in broker
    assert agent["torch"].endswith("+cpu")
    assert "triton" not in agent
    assert not cuda["torch"].endswith("+cpu")
    assert "triton" in cuda
    assert {"nixl", "nixl-cu12"} <= agent.keys() & cuda.keys()


def test_images_have_what_is_tested() -> None:
    tested = versions("setup") | versions("cuda")
    for image in IMAGES:
        held = {name: one.partition("+")[0] for name, one in versions(image).items()}
        assert {name: tested.get(name) for name in held} == held, image


def test_the_images_install_nothing_else() -> None:
    text = (ROOT / "docker" / "Dockerfile").read_text().replace("\\\n", "")
    installs = re.findall(r"pip install .*", text)
    assert len(installs) == 2 + len(IMAGES)
    for one in installs:
        assert "--require-hashes --no-deps" in one or "--no-build-isolation" in one, one
