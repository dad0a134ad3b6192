"""`./run bench`: its options, its list of suites, and the rows that it writes."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.main import SUITES, Suite, app


def test_help_has_one_line_for_each_suite() -> None:
    done = CliRunner().invoke(app, ["--help"])
    lines = [line.split() for line in done.stdout.splitlines()]
    for suite in SUITES:
        assert [line for line in lines if line[:1] == [suite.name] and len(line) > 2]


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.name)
def test_every_suite_has_its_function(suite: Suite) -> None:
    module, function = suite.function.split(":")
    assert callable(getattr(importlib.import_module(f"bench.{module}"), function))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--suite", "nothing"), "there is no suite 'nothing'"),
        (("--case", "nano"), "name suites too"),
        (("--suite", "planning", "--sets", "2"), "name suites too"),
    ],
)
def test_wrong_options_are_refused(options: tuple[str, ...], words: str) -> None:
    done = CliRunner().invoke(app, options)
    assert done.exit_code == 2
    assert words in done.output


def test_rows_are_written_with_the_machine(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    options = ["--suite", "host-copies", "--repeats", "1", "--json", str(file)]
    done = CliRunner().invoke(app, options, catch_exceptions=False)
    assert done.exit_code == 0
    written = json.loads(file.read_text())
    assert "Linux" in written["machine"]
    assert {row["suite"] for row in written["rows"]} == {"host-copies"}
    assert all(row["ratio"] == row["reference_value"] / row["value"] for row in written["rows"])
