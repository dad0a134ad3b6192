"""Every reason that an engine can be told is explained: by the command, by the runbook."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.typed import document, printed, typed
from restow.broker.client import BrokerCallError
from restow.broker.client.engine.open_handoffs import SILENT
from restow.broker.errors import RestowError
from restow.broker.reasons import REASONS, UNKNOWN, advice_for

ROOT = Path(__file__).resolve().parents[2]
BROKER = ROOT / "broker" / "restow" / "broker"
AGENTS = ROOT / "agents" / "restow" / "agents"
OF_ENDS = (SILENT, "SESSION_CLOSED")
"""What an engine is told by its own session, or tells itself."""
NOT_TO_ENGINES = {
    "COSTS_INVALID": "said to who gives costs",
    "WORD_UNKNOWN": "said to who makes a value",
    "LISTEN_FAILED": "said to who starts a broker",
    "TOKENS_FILE_INVALID": "said to who starts a broker",
    "EXTRA_MISSING": "said to who types a command",
    "HANDOFF_AMBIGUOUS": "said to who types a command",
    "SETTING_UNKNOWN": "said to who starts a broker or an agent",
    "FILE_NOT_WRITABLE": "said to who types a command",
}
MODULES = (
    "restow.broker.errors",
    "restow.broker.trust.errors",
    "restow.broker.client.connection.errors",
    "restow.broker.client.connection.brokers",
    "restow.broker.registry.registry",
    "restow.broker.registry.etcd_access",
    "restow.broker.registry.kubernetes",
    "restow.agents.memory.errors",
    "restow.agents.engines.common.adapter_errors",
    "restow.agents.store.room",
    "restow.agents.store.run_files",
)
"""All typed errors that an engine's process may meet."""


def reasons_of_failures(path: Path) -> Iterator[str]:
    """Yield the reason of each failure of a handoff and each answer to a command in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Call(func=ast.Name(id="Failure"), args=[_, ast.Constant(value=str(why)), _]):
                yield why
            case ast.Call(func=ast.Name(id="refused"), args=[ast.Constant(value=str(why)), _]):
                yield why
            case ast.Call(
                func=ast.Name(id="Answer"), args=[_, _, ast.Constant(value=str(why)), _]
            ) if why:
                yield why


def reasons_of_modules() -> Iterator[str]:
    """Yield the reason of every typed error that the modules define."""
    for name in MODULES:
        for one in vars(importlib.import_module(name)).values():
            if isinstance(one, type) and issubclass(one, RestowError) and one.__module__ == name:
                yield one.reason


def reasons_told_to_engines() -> set[str]:
    """Return the reasons that the broker's core gives, and those of errors that reach an engine."""
    files = [*(BROKER / "core").rglob("*.py"), *AGENTS.rglob("*.py")]
    found = {reason for path in files for reason in reasons_of_failures(path)}
    found.update(reasons_of_modules())
    # An error that names no reason of its own has that of the base.
    return found - set(NOT_TO_ENGINES) - {BrokerCallError.reason} | {RestowError.reason, *OF_ENDS}


def test_all_reasons_are_explained_and_no_others() -> None:
    found = reasons_told_to_engines()
    assert len(found) > 60
    assert found == set(REASONS)


def test_what_is_said_to_others_is_said_by_a_class_of_ours() -> None:
    assert set(NOT_TO_ENGINES) <= set(reasons_of_modules())


@pytest.mark.parametrize("reason", sorted(REASONS))
def test_what_is_said_is_a_sentence_and_a_step(reason: str) -> None:
    for words in REASONS[reason]:
        assert re.fullmatch(r"[A-Z][^\n]+\.", words)


def test_a_reason_of_another_version_is_no_error() -> None:
    assert advice_for("OF_A_LATER_VERSION") is UNKNOWN


def test_the_command_lists_all_or_one() -> None:
    listed = printed("reasons")
    assert [line for line in listed.splitlines() if not line.startswith(" ")] == sorted(REASONS)
    one = printed("reasons", "lease_expired")
    assert one.splitlines()[0] == "LEASE_EXPIRED"
    assert REASONS["LEASE_EXPIRED"].next_step in one
    found = document("reasons", "AGENT_LOST")
    assert found == {"AGENT_LOST": REASONS["AGENT_LOST"]._asdict()}


def test_what_is_no_reason_is_wrong_usage() -> None:
    result = typed("reasons", "WEATHER")
    assert result.exit_code == 2
    assert "WEATHER is not a known reason" in " ".join(result.output.split())


def test_the_runbook_has_the_same_words() -> None:
    page = (ROOT / "docs" / "runbook.md").read_text()
    rows = re.findall(r"^\| `([A-Z_]+)` \| (.+) \| (.+) \|$", page, re.MULTILINE)
    assert {name: tuple(words) for name, *words in rows} == {
        name: tuple(advice) for name, advice in REASONS.items()
    }
