"""The compose file says what the programs in it understand, and what the pages say of it."""

from __future__ import annotations

import re
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
