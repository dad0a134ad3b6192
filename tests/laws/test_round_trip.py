"""Law: P to D to P gives the first bytes back, where dtypes allow it."""

from __future__ import annotations

from hypothesis import given

from laws.checks import check_round_trip
from laws.rounds import tried
from laws.strategies import CASTING, STRATEGIES, Case, any_cases, cast_cases
from restow.broker.planner import Strategy


@tried("round trip")
@given(any_cases(), STRATEGIES, STRATEGIES)
def test_round_trip(case: Case, there: Strategy, back: Strategy) -> None:
    check_round_trip(case, there, back)


@tried("round trip, casts")
@given(cast_cases(), CASTING)
def test_round_trip_of_numbers_that_every_type_holds(case: Case, strategy: Strategy) -> None:
    check_round_trip(case, strategy, strategy)
