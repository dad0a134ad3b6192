"""Every reason of a handoff's end is explained: by the command, by the runbook, and no other is."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from restow.broker.cli.main import app
from restow.broker.errors import ContentMismatchError, PagesError, PlanError, RestowError
from restow.broker.reasons import REASONS, UNKNOWN, advice_for

ROOT = Path(__file__).resolve().parents[2]
BROKER, AGENTS = ROOT / "broker" / "restow" / "broker", ROOT / "agents" / "restow" / "agents"
NO_HANDOFFS = {
    "REGION_INVALID": "an agent does not start with it",
    "DAEMON_UNREACHABLE": "said to who calls a daemon",
    "COSTS_INVALID": "said to who gives costs",
}


def reasons_of_classes(path: Path) -> Iterator[str]:
    """Of the typed errors in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ClassDef):
            continue
        for part in node.body:
            match part:
                case ast.Assign(
                    targets=[ast.Name(id="reason")], value=ast.Constant(value=str(reason))
                ):
                    yield reason


def reasons_of_failures(path: Path) -> Iterator[str]:
    """Of each `Failure(state, "REASON", words)`."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Call(func=ast.Name(id="Failure"), args=[_, ast.Constant(value=str(why)), _]):
                yield why


def reasons_that_end_handoffs() -> set[str]:
    """What the broker's mind says, what planning may raise, and what agents may report."""
    found = {
        reason for path in [*(BROKER / "core").glob("*.py")] for reason in reasons_of_failures(path)
    }
    found.update(reasons_of_classes(AGENTS / "errors.py"))
    found.update(one.reason for one in (*_and_below(PlanError), *_and_below(PagesError)))
    return (found | {RestowError.reason, ContentMismatchError.reason}) - set(NO_HANDOFFS)


def _and_below(kind: type[RestowError]) -> Iterator[type[RestowError]]:
    yield kind
    for one in kind.__subclasses__():
        yield from _and_below(one)


def test_all_reasons_are_explained_and_no_others() -> None:
    found = reasons_that_end_handoffs()
    assert len(found) > 30
    assert found == set(REASONS)


@pytest.mark.parametrize("reason", sorted(REASONS))
def test_what_is_said_is_a_sentence_and_a_step(reason: str) -> None:
    for words in REASONS[reason]:
        assert re.fullmatch(r"[A-Z][^\n]+\.", words)


def test_a_reason_of_another_version_is_no_error() -> None:
    assert advice_for("OF_A_LATER_VERSION") is UNKNOWN


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["reasons", *arguments])


def test_the_command_lists_all_or_one() -> None:
    listed = invoke().stdout
    assert [line for line in listed.splitlines() if not line.startswith(" ")] == sorted(REASONS)
    one = invoke("lease_expired").stdout
    assert one.splitlines()[0] == "LEASE_EXPIRED"
    assert REASONS["LEASE_EXPIRED"].next_step in one
    assert json.loads(invoke("AGENT_LOST", "--json").stdout) == {
        "AGENT_LOST": REASONS["AGENT_LOST"]._asdict()
    }


def test_what_is_no_reason_is_wrong_usage() -> None:
    result = invoke("WEATHER")
    assert result.exit_code == 2
    assert "WEATHER is no reason" in " ".join(result.output.split())


def test_the_runbook_has_the_same_words() -> None:
    page = (ROOT / "docs" / "runbook.md").read_text()
    rows = re.findall(r"^\| `([A-Z_]+)` \| (.+) \| (.+) \|$", page, re.MULTILINE)
    assert {name: tuple(words) for name, *words in rows} == {
        name: tuple(advice) for name, advice in REASONS.items()
    }
