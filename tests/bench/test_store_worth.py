"""The simulator of what a store keeps: its traces, and that the store's rule beats LRU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))

from store_traces import TRACES, Trace
from store_worth import COSTS, SHAPES, simulate, working_set_bytes

from restow.agents.store.books.kept import least_recently_used, recomputing_cost


@pytest.mark.parametrize("trace", TRACES.values(), ids=TRACES)
def test_a_seed_makes_the_same_trace_in_the_order_of_time(trace: Trace) -> None:
    some = list(trace(3, 60))
    assert some == list(trace(3, 60)) != list(trace(4, 60))
    assert sorted(some, key=lambda one: one.at_s) == some


@pytest.mark.parametrize("name", SHAPES)
def test_nothing_is_found_that_is_not_there_and_costs_are_worth_more(name: str) -> None:
    requests, shape, cost = list(TRACES["prompts"](0, 120)), SHAPES[name], COSTS[name]
    size = working_set_bytes(requests, shape)
    lru = simulate(requests, shape, cost, least_recently_used, size // 10)
    ours = simulate(requests, shape, cost, recomputing_cost, size // 10)
    endless = simulate(requests, shape, cost, least_recently_used, 2 * size)
    assert lru.saved < ours.saved < endless.saved
    assert lru.hit_tokens < ours.hit_tokens < endless.hit_tokens < endless.tokens
