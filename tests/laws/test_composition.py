"""Laws of several transfers: P to Q to D is P to D, P to D to P gives the first bytes back.

And what a store was given comes out of it as if P had handed it over itself.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from laws.checks import check_composition, check_round_trip
from laws.rounds import tried
from laws.strategies import CASTING, STRATEGIES, Case, any_cases, cast_cases, draft_cases
from restow.broker.errors import BlockTokensMismatchError
from restow.broker.layout import Layout, RankLayout, Region
from restow.broker.layout.check_whole import check_layout
from restow.broker.layout.span import volume
from restow.broker.layout.store_layout import least_block_tokens, store_layout
from restow.broker.planner import Strategy
from restow.broker.planner.plan import check_whole_blocks

THREE = st.tuples(STRATEGIES, STRATEGIES, STRATEGIES)


@tried("composition")
@given(any_cases(engines=3), THREE)
def test_composition(case: Case, strategies: tuple[Strategy, Strategy, Strategy]) -> None:
    check_composition(case, strategies)


@tried("round trip")
@given(any_cases(), STRATEGIES, STRATEGIES)
def test_round_trip(case: Case, there: Strategy, back: Strategy) -> None:
    check_round_trip(case, there, back)


@tried("round trip, casts")
@given(cast_cases(), CASTING)
def test_round_trip_of_numbers_that_every_type_holds(case: Case, strategy: Strategy) -> None:
    check_round_trip(case, strategy, strategy)


def fits(layouts: tuple[Layout, ...]) -> bool:
    """Return whether each layout has the beginnings of the blocks that the next keeps whole."""
    try:
        for source, destination in pairwise(layouts):
            check_whole_blocks(source, destination)
    except BlockTokensMismatchError:
        return False
    return True


@st.composite
def stored_cases(draw: st.DrawFn) -> Case:
    """Draw P and D of any kind, and between them a store of a block size that suits both."""
    case = draw(st.one_of(any_cases(), draft_cases()))
    source, destination = case.layouts
    sizes = (None, *range(1, 10), least_block_tokens(source) * 2)
    made = ((source, store_layout(source, size), destination) for size in sizes)
    fitting = [layouts for layouts in made if fits(layouts)]
    if not fitting:  # D keeps blocks that no store between these two has: it is refused
        fitting = [(source, store_layout(source), store_layout(source))]
    return replace(case, layouts=draw(st.sampled_from(fitting)))


@tried("store")
@given(stored_cases(), THREE)
def test_p_to_store_to_d_is_p_to_d(
    case: Case, strategies: tuple[Strategy, Strategy, Strategy]
) -> None:
    check_layout(case.layouts[1])
    check_composition(case, strategies)


@tried("store")
@given(any_cases())
def test_pages_have_no_gaps_but_for_alignment(case: Case) -> None:
    made = store_layout(case.layouts[0])
    (rank,) = made.ranks
    for region in rank.regions:
        used = sum(
            volume(one.box) * one.dtype.itemsize_bytes * (region.page_tokens or 1)
            for one in rank.shards
            if one.region == region.name
        )
        wasted = region.page_stride_bytes - used
        assert 0 <= wasted < 64 * sources(case.layouts[0], region, rank)


def sources(layout: Layout, region: Region, stored: RankLayout) -> int:
    """Return how many of the engine's regions a region of the store is made of, at most."""
    mine = {one.field for one in stored.shards if one.region == region.name}
    return len({(r.rank, s.region) for r in layout.ranks for s in r.shards if s.field in mine})
