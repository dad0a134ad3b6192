"""The broker's own Python calls for one handoff: a count that has no noise, unlike time."""

from __future__ import annotations

from bench.control.handoff_calls import LIMIT, MOST, counted


def test_the_broker_calls_no_more_functions_for_a_handoff_than_the_limit_says() -> None:
    calls = counted()
    whole = sum(calls.values())
    often = ", ".join(f"{name} {count:g}" for name, count in list(calls.items())[:20])
    assert whole <= MOST, f"{whole:.1f} calls for a handoff, the limit is {LIMIT}: {often}"
    # As much as a handoff takes at the least: what counts less has not counted.
    assert whole >= LIMIT / 2
