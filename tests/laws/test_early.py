"""Law: what is read early and what is read at the end are the whole, and each byte once.

Whatever the layouts and ways of travelling, and wherever P has paused: snapshots move at the end
alone, and nothing is read of tokens that P has not computed yet.
"""

from __future__ import annotations

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from laws.checks import engines_of
from laws.executor import Arena
from laws.rounds import tried
from laws.strategies import CASTING, STRATEGIES, Case, cast_cases, draft_cases, family_cases
from laws.transfers import transfer
from laws.values import POISON
from laws.world import Engine
from restow.agents.binding.pages import TokenRange
from restow.broker.planner import Strategy, early_plan, make_plan

PARTS = st.lists(st.integers(0, 13), min_size=1, max_size=3)


@tried("early, families")
@given(family_cases(early=True), STRATEGIES, PARTS)
def test_families(case: Case, strategy: Strategy, parts: list[int]) -> None:
    check_early(case, strategy, parts)


@tried("early, casts")
@given(cast_cases(), CASTING, PARTS)
def test_casts(case: Case, strategy: Strategy, parts: list[int]) -> None:
    check_early(case, strategy, parts)


@tried("early, drafts")
@given(draft_cases(early=True), STRATEGIES, PARTS)
def test_drafts(case: Case, strategy: Strategy, parts: list[int]) -> None:
    check_early(case, strategy, parts)


def check_early(case: Case, strategy: Strategy, parts: list[int]) -> None:
    """Let P compute up to each of ``parts`` while D reads what is new, and then the rest."""
    plan = make_plan(*case.layouts[:2])
    early = early_plan(plan)
    assume(early is not None)
    arena = Arena()
    source, destination = engines_of(case, arena)
    first, stop = case.tokens.start, case.tokens.stop
    for part in sorted(parts):
        if first < part < stop:
            computed_up_to(part, source, case)
            transfer(source, destination, TokenRange(first, part), strategy, early)
            first = part
    computed_up_to(stop, source, case)
    transfer(source, destination, TokenRange(first, stop), strategy, plan)
    destination.check(case.arriving, case.tokens, written=True)
    source.check(case.state, TokenRange(0, stop), written=False)


def computed_up_to(tokens: int, source: Engine, case: Case) -> None:
    """Write the first ``tokens`` into P's memory, and poison for the others."""
    image = np.full(source.arena.data.shape, POISON, np.uint8)
    source.furnish(image, case.state)
    source.write(image, case.state, TokenRange(0, tokens))
    mine = slice(source.start, source.stop)
    source.arena.data[mine] = image[mine]
