"""The laws catch tokens that are looked for on the wrong rank, or at the wrong place there.

Each mutation of what ranks share out turns one of them red.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from laws import transfers
from laws.strategies import any_cases, outright_cases
from laws.test_laws_bite import bites, change_function, cover
from restow.agents.binding import copies as alike_rows
from restow.agents.binding.pages import PageList
from restow.broker.errors import PagesError
from restow.broker.layout import Layout, Region, TokenClass
from restow.broker.planner import Strategy, make_plan
from restow.broker.planner.program import GroupPair

SLICES, WHOLE, PACK = Strategy.SLICES, Strategy.WHOLE, Strategy.PACK
RED = (AssertionError, PagesError, IndexError)


def believed(change: Callable[[Region], Region]) -> Callable[[Layout, Layout], object]:
    """Return a planner that takes P's regions for what ``change`` makes of them."""

    def planner(source: Layout, destination: Layout) -> object:
        ranks = (replace(rank, regions=tuple(map(change, rank.regions))) for rank in source.ranks)
        return make_plan(replace(source, ranks=tuple(ranks)), destination)

    return planner


WRONG: dict[str, Callable[[Region], Region]] = {
    "replicas": lambda region: replace(
        region, context_parts=1, context_part=0, interleave_tokens=1
    ),
    "backwards": lambda region: replace(
        region, context_part=region.context_parts - 1 - region.context_part
    ),
    "by one": lambda region: replace(region, interleave_tokens=1),
}


@pytest.mark.parametrize("strategy", [SLICES, PACK])
@pytest.mark.parametrize("name", WRONG)
def test_parts_taken_for_others(
    monkeypatch: pytest.MonkeyPatch, name: str, strategy: Strategy
) -> None:
    monkeypatch.setattr(transfers, "make_plan", believed(WRONG[name]))
    bites(cover(strategy), outright_cases(), by=RED)


@pytest.mark.parametrize("strategy", [SLICES, WHOLE, PACK])
def test_tokens_that_lie_where_they_would_without_runs(
    monkeypatch: pytest.MonkeyPatch, strategy: Strategy
) -> None:
    # The mutation gives a rank every n-th token, whatever the length of the runs.
    monkeypatch.setattr(TokenClass, "before", lambda held, token: token // held.parts)
    bites(cover(strategy), any_cases(), by=RED)


@pytest.mark.parametrize("strategy", [SLICES, PACK])
def test_tokens_joined_that_follow_each_other_on_one_side(
    monkeypatch: pytest.MonkeyPatch, strategy: Strategy
) -> None:
    def one_side(right: Any, pair: Any, start: int, stop: int, forms: Any) -> Any:
        return right(pair, start, stop, [form for form in forms if form is not pair.dst])

    change_function(monkeypatch, alike_rows, "cut_shared", one_side)
    bites(cover(strategy), any_cases(), by=RED)


def test_a_run_with_room_for_the_tokens_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def as_in_the_prompt(right: Any, pages: PageList, stretches: Any) -> Any:
        page, place = right(pages, stretches)
        if pages.ids is None and place is not None and len(place):
            place = stretches.first - stretches.first[0]
        return page, place

    right = PageList.holding
    monkeypatch.setattr(PageList, "holding", lambda *args: as_in_the_prompt(right, *args))
    bites(cover(PACK), any_cases(), by=RED)


def test_pages_counted_as_if_all_tokens_were_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_prompt(right: Any, pair: GroupPair, start: int, stop: int) -> Any:
        whole = replace(pair, src=replace(pair.src, tokens=TokenClass()))
        return right(whole, start, stop)

    change_function(monkeypatch, GroupPair, "src_pages", by_prompt)
    bites(cover(WHOLE), any_cases(), by=(*RED, ValueError))
