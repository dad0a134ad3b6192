"""Law: layers of a draft that P lacks are zero at D, and everything else is P's.

Each mutation below turns it red.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from laws.checks import check_cover
from laws.rounds import tried
from laws.strategies import STRATEGIES, Case, draft_cases
from laws.test_laws_bite import bites, change_function, cover
from restow.broker.errors import PlanError
from restow.broker.layout import check_layout
from restow.broker.planner import Strategy, clearing, plan
from restow.broker.planner.program import Column


@tried("cover, drafts")
@given(draft_cases(), STRATEGIES)
def test_drafts_of_one_side_or_of_both(case: Case, strategy: Strategy) -> None:
    for layout in case.layouts:
        check_layout(layout)
    check_cover(case, strategy)


def test_drafts_that_are_left_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another request's content stays in D's pages."""
    change_function(monkeypatch, clearing, "_shard_rows", lambda right, *args: right(*args)[:0])
    bites(cover(Strategy.SLICES), draft_cases())


def test_another_draft_that_is_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two drafts the layers have one name, and are taken for one."""

    def by_name(right: Any, source: Any, destination: Any) -> Any:
        return right(source, destination) - {field.name for field in source.model.fields}

    change_function(monkeypatch, plan, "cold_fields", by_name)
    bites(cover(Strategy.SLICES), draft_cases(), by=(AssertionError, PlanError))


def test_only_the_first_token_of_a_page_is_zeroed(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_token(right: Any, *args: Any) -> Any:
        rows = right(*args)
        rows[:, Column.DST_TOKEN_STRIDE_BYTES] = 0
        return rows

    change_function(monkeypatch, clearing, "_shard_rows", one_token)
    bites(cover(Strategy.SLICES), draft_cases())
