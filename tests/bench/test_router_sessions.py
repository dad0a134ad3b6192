"""Conversations through the router: the counts are those of the engines."""

from __future__ import annotations

import asyncio

from bench.store.counting_engines import COMPUTED, HELD, MOVED
from bench.store.router_sessions import Outcome, Sizes, play

SMALL = Sizes(users=6, system_prompts=2, system_tokens=128, at_once=2, find_s=5.0)
TURNS = 3


def test_a_router_that_finds_computes_and_moves_less() -> None:
    finding, without = Outcome(), Outcome()
    asyncio.run(play(finding, SMALL, seed=1, turns=TURNS, finds=True))
    asyncio.run(play(without, SMALL, seed=0, turns=TURNS, finds=False))
    for one in (finding, without):
        assert one.prefill.keys() <= {COMPUTED, HELD}
        assert one.decode.keys() <= {MOVED, HELD}
        assert one.prefill.total() == one.decode.total()
        assert len(one.first_s) == SMALL.users * (TURNS - 1)
    assert finding.found > without.found
    assert finding.prefill[COMPUTED] < without.prefill[COMPUTED]
    assert finding.decode[MOVED] < without.decode[MOVED]
