"""Law: layers of a draft that P lacks are zero at D, and everything else is P's.

Each mutation below turns it red.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laws.checks import check_cover
from laws.rounds import tried
from laws.strategies import STRATEGIES, Case, draft_cases
from laws.test_laws_bite import bites, change_function, cover
from restow.agents.binding.pages import TokenRange
from restow.broker.errors import PlanError, RestowError
from restow.broker.families import EngineSettings, MlaSpec, ModelSpec, build_layout
from restow.broker.layout import DType, check_layout
from restow.broker.planner import Strategy, plan
from restow.broker.planner import compile as clearing
from restow.broker.planner.program import Column


@tried("cover, drafts")
@given(draft_cases(), STRATEGIES)
def test_drafts_of_one_side_or_of_both(case: Case, strategy: Strategy) -> None:
    for layout in case.layouts:
        check_layout(layout)
    check_cover(case, strategy)


def test_drafts_that_are_left_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    # The content of another request stays in D's pages.
    change_function(monkeypatch, clearing, "_shard_rows", lambda right, *args: right(*args)[:0])
    bites(cover(Strategy.SLICES), draft_cases())


def test_another_draft_that_is_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that layers of two drafts with the same names are not taken for the same layers."""

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


def test_the_pages_of_a_rank_that_shares_tokens_out_are_taken_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = ModelSpec("m", (MlaSpec(0, 8, DType.FLOAT32),))
    drafting = replace(own, draft_layers=(MlaSpec(1, 8, DType.FLOAT32),), draft="mtp")
    shared = EngineSettings(tp=2, dcp=2, page_tokens=4, interleave_tokens=2)
    layouts = build_layout(own, EngineSettings()), build_layout(drafting, shared)
    case = Case(layouts, TokenRange(0, 13), False, 64, 0)
    check_cover(case, Strategy.SLICES)
    change_function(monkeypatch, clearing, "PageForm", lambda right, *args: right(*args[:3]))
    bites(cover(Strategy.SLICES), st.just(case), by=(AssertionError, RestowError))
