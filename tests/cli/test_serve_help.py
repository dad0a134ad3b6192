"""The settings of the broker in ``restow serve --help`` and docs/settings.md."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from restow.broker.cli.main import app
from restow.broker.server.base.settings import BrokerSettings

ROOT = Path(__file__).resolve().parents[2]


def shown(columns: int) -> str:
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(app, ["serve", "--help"]).stdout


def test_every_option_has_a_group_and_its_variable() -> None:
    groups: dict[str, set[str]] = {}
    for line in shown(400).splitlines():
        if title := re.match(r"╭─ (.+?) ─", line):
            names = groups.setdefault(title[1], set())
        elif option := re.match(r"│ +--([a-z-]+)", line):
            name = option[1].replace("-", "_")
            names.add(name)
            assert line.count("[env var: ") == (name != "help"), line
            assert name == "help" or f"[env var: RESTOW_{name.upper()}" in line, line
    assert groups.pop("Options") == {"config", "help"}
    assert set(BrokerSettings.model_fields) <= set().union(*groups.values())
    assert len(groups) == 7


def test_a_narrow_terminal_shows_all_of_it() -> None:
    narrow = shown(80)
    assert max(map(len, narrow.splitlines())) <= 80
    assert "…" not in narrow


def test_the_page_is_that_of_the_settings() -> None:
    command = [sys.executable, str(ROOT / "docs" / "settings.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == (ROOT / "docs" / "settings.md").read_text(), (
        "docs/settings.md is not what the settings say: python docs/settings.py > docs/settings.md"
    )
