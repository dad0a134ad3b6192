"""pre-commit runs what `./run test` lints."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]


def test_hooks_are_the_commands_of_lint() -> None:
    (lint,) = re.findall(r"^lint\(\) \{\n(.*?)^\}", (ROOT / "run").read_text(), re.M | re.S)
    commands = {
        line.strip().replace('"$venv/bin/', "").replace('"', "") for line in lint.split("\n")
    }
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    hooks = {hook["entry"].removeprefix(".venv/bin/") for hook in repo["hooks"]}
    # A hook formats what CI only checks.
    assert hooks == {one.replace(" --check", "") for one in commands if one}
