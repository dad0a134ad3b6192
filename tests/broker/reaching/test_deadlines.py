"""Deadlines: never early, never lost, at most one bucket late."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from restow.broker.core.ledger.handoff_table import Deadlines

BUCKET_S = 0.05
times = st.floats(0, 1e6, allow_nan=False)


def test_an_empty_one_has_nothing() -> None:
    assert Deadlines().due(1e9) == []


def test_each_entry_comes_out_once() -> None:
    deadlines = Deadlines(BUCKET_S)
    deadlines.add(1.0, 7)
    deadlines.add(1.0, 8)
    assert deadlines.numbers() == {7, 8}
    assert deadlines.due(1.0) == []
    assert deadlines.due(1.11) == [7, 8]
    assert deadlines.due(2.0) == []
    assert deadlines.numbers() == set()


@given(st.lists(times), st.lists(times, min_size=1))
def test_never_early_never_lost_at_most_a_bucket_late(
    entries: list[float], looks: list[float]
) -> None:
    deadlines = Deadlines(BUCKET_S)
    for number, when_s in enumerate(entries):
        deadlines.add(when_s, number)
    waiting = set(range(len(entries)))
    for now_s in sorted(looks):
        due = deadlines.due(now_s)
        assert len(due) == len(set(due))
        assert waiting.issuperset(due)
        assert all(entries[number] <= now_s for number in due)
        waiting -= set(due)
        assert all(entries[number] > now_s - BUCKET_S - 1e-6 for number in waiting)
    assert deadlines.numbers() == waiting


@given(st.lists(st.tuples(times, times)))
def test_adding_between_looks(steps: list[tuple[float, float]]) -> None:
    deadlines, now_s = Deadlines(BUCKET_S), 0.0
    seen: list[int] = []
    for number, (ahead_s, passes_s) in enumerate(steps):
        deadlines.add(now_s + ahead_s, number)
        now_s += passes_s
        seen += deadlines.due(now_s)
    seen += deadlines.due(1e12)
    assert sorted(seen) == list(range(len(steps)))
