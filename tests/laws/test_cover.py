"""Law: every destination element is written exactly once, with the value of the global tensor.

Rows for speculative tokens, and layers of a draft that P lacks, are zeroed; padding, other pages,
neighbours and guard bytes stay untouched. Windows that D rebuilds are those that P holds, and
nothing is read for them but inputs.
"""

from __future__ import annotations

from hypothesis import given

from laws.checks import check_cover
from laws.rebuilding import check_recompute, rebuilding_cases
from laws.rounds import CASES, tried
from laws.strategies import (
    CASTING,
    STRATEGIES,
    Case,
    cast_cases,
    draft_cases,
    family_cases,
    outright_cases,
)
from restow.broker.layout import check_layout
from restow.broker.planner import Strategy


@tried("cover, families")
@given(family_cases(), STRATEGIES)
def test_families(case: Case, strategy: Strategy) -> None:
    for layout in case.layouts:
        check_layout(layout)
    check_cover(case, strategy)


@tried("cover, outright")
@given(outright_cases(), STRATEGIES)
def test_outright_shards(case: Case, strategy: Strategy) -> None:
    for layout in case.layouts:
        check_layout(layout)
    check_cover(case, strategy)


@tried("cover, casts")
@given(cast_cases(), CASTING)
def test_casts(case: Case, strategy: Strategy) -> None:
    check_cover(case, strategy)


@tried("cover, drafts")
@given(draft_cases(), STRATEGIES)
def test_drafts_of_one_side_or_of_both(case: Case, strategy: Strategy) -> None:
    for layout in case.layouts:
        check_layout(layout)
    check_cover(case, strategy)


@tried("recompute")
@given(rebuilding_cases())
def test_windows_are_rebuilt(case: Case) -> None:
    check_recompute(case)


def test_the_laws_are_tried_often_enough() -> None:
    assert sum(CASES.values()) >= 3000
