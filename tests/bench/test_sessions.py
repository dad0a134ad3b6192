"""Conversations through the router: what is counted is what the engines of the set say."""

from __future__ import annotations

from typing import Any

import pytest
import sessions
from rows import Row
from session_engines import COMPUTED, HELD, MOVED


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A set that is through with it in seconds."""
    sizes: dict[str, Any] = {"USERS": 6, "SYSTEM_PROMPTS": 2, "SYSTEM_TOKENS": 128, "AT_ONCE": 2}
    for name, value in sizes.items():
        monkeypatch.setattr(sessions, name, value)
    monkeypatch.setattr(sessions, "CASES", {"three turns": 3})
    monkeypatch.setattr(sessions, "FIND_S", 5.0)


def test_who_finds_computes_less(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes: list[sessions.Outcome] = []
    made = sessions.Outcome

    def outcome() -> sessions.Outcome:
        outcomes.append(made())
        return outcomes[-1]

    monkeypatch.setattr(sessions, "Outcome", outcome)
    rows: list[Row] = []
    sessions.run(rows.append, 3)
    finding, without = outcomes
    for one in outcomes:
        assert one.prefill.keys() <= {COMPUTED, HELD}
        assert one.decode.keys() <= {MOVED, HELD}
        assert one.prefill.total() == one.decode.total()
        assert len(one.first_s) == 6 * 2
    assert finding.found > without.found
    computed, moved = rows
    assert min(computed.ratio, moved.ratio) > 1.0
    assert f"{finding.prefill[COMPUTED]} of " in computed.note
