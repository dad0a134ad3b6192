"""Law: P to Q to D equals P to D."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from laws.checks import check_composition
from laws.rounds import tried
from laws.strategies import STRATEGIES, Case, any_cases
from restow.broker.planner import Strategy


@tried("composition")
@given(any_cases(engines=3), st.tuples(STRATEGIES, STRATEGIES, STRATEGIES))
def test_composition(case: Case, strategies: tuple[Strategy, Strategy, Strategy]) -> None:
    check_composition(case, strategies)
