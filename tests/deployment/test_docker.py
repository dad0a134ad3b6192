"""The files in docker/: the compose files, the Dockerfile, and the versions that images install."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
FILES = ("compose.yaml", "daemons.yaml")
HARD = {
    "read_only": True,
    "cap_drop": ["ALL"],
    "security_opt": ["no-new-privileges:true"],
    "init": True,
}


def services(file: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load((DOCKER / file).read_text())["services"]
    return found


@pytest.mark.parametrize("file", FILES)
def test_no_service_may_more_than_it_needs(file: str) -> None:
    for name, one in services(file).items():
        assert {key: one.get(key) for key in HARD} == HARD, name
        for port in one.get("ports", []):
            assert port.startswith("127.0.0.1:"), f"{name} is open to everybody"


@pytest.mark.parametrize("file", FILES)
def test_every_name_that_is_used_is_there(file: str) -> None:
    all_of_it = services(file)
    for name, one in all_of_it.items():
        assert set(one.get("depends_on", {})) <= all_of_it.keys(), name
        shared = one.get("ipc", "").removeprefix("service:")
        assert shared in {"", "shareable", *all_of_it}, name
        for host in re.findall(r"http://([a-z0-9]+):", " ".join(one.get("command", []))):
            assert host in all_of_it, name


def test_prometheus_asks_the_broker_where_it_shows_its_metrics() -> None:
    asked = yaml.safe_load((DOCKER / "prometheus" / "prometheus.yaml").read_text())
    (job,) = asked["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    command = services("compose.yaml")["broker"]["command"]
    shown = command[command.index("--http-listen") + 1]
    assert target == f"broker:{shown.rpartition(':')[2]}"
    for file in asked["rule_files"]:
        assert (DOCKER / "prometheus" / file).exists()


HADOLINT = shutil.which("hadolint", path=Path(sys.executable).parent)


@pytest.mark.skipif(HADOLINT is None, reason="hadolint has no package for this machine")
def test_hadolint_finds_nothing(tmp_path: Path) -> None:
    assert HADOLINT is not None
    bad = tmp_path / "Dockerfile"
    bad.write_text("FROM python:latest\nRUN cd /tmp && pip install restow\n")
    for file, finds in ((bad, True), (ROOT / "docker" / "Dockerfile", False)):
        found = subprocess.run([HADOLINT, file], capture_output=True, text=True, check=False)
        assert (found.returncode != 0) == finds, found.stdout


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
    # Each image's, the package, what builds it, and what lists the packages of an image.
    assert len(installs) == 3 + len(IMAGES)
    for one in installs:
        assert "--require-hashes --no-deps" in one or "--no-build-isolation" in one, one
