"""The simulation of a store's eviction: its traces, and that the store's rule beats LRU."""

from __future__ import annotations

import pytest

from bench.store.eviction import COSTS, SHAPES, TRACES, Trace, simulate, working_set_bytes
from restow.agents.store.kept import least_recently_used, recomputing_cost


@pytest.mark.parametrize("trace", TRACES.values(), ids=TRACES)
def test_a_seed_makes_the_same_trace_in_order_of_time(trace: Trace) -> None:
    requests = list(trace(3, 60))
    assert requests == list(trace(3, 60)) != list(trace(4, 60))
    assert sorted(requests, key=lambda one: one.at_s) == requests


@pytest.mark.parametrize("name", SHAPES)
def test_the_stores_rule_saves_more_than_lru_and_less_than_endless_room(name: str) -> None:
    requests, shape, cost = list(TRACES["prompts"](0, 120)), SHAPES[name], COSTS[name]
    size = working_set_bytes(requests, shape)
    lru = simulate(requests, shape, cost, least_recently_used, size // 10)
    ours = simulate(requests, shape, cost, recomputing_cost, size // 10)
    endless = simulate(requests, shape, cost, least_recently_used, 2 * size)
    assert lru.saved < ours.saved < endless.saved
    assert lru.hit_tokens < ours.hit_tokens < endless.hit_tokens < endless.tokens
