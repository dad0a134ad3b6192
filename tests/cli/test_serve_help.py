"""The help of ``restow serve``: options in groups, each with the variable that says the same."""

from __future__ import annotations

import re

from typer.testing import CliRunner

from restow.broker.cli.main import app
from restow.broker.server.base.settings import BrokerSettings


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
