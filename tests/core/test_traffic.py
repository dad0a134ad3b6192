"""What ended in the last quarter of an hour: a ring that forgets, quantiles, pairs, spans."""

from __future__ import annotations

import math
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from core.test_returning import back
from core.world import World, p_and_d, reading
from restow.broker.core.common import traffic as traffic_module
from restow.broker.core.common.keys import State
from restow.broker.core.common.limits import Limits
from restow.broker.core.common.traffic import (
    KEPT_S,
    MAX_PAIRS,
    QuantileCounts,
    TallySeries,
    Traffic,
    busiest,
    count_end,
    slot_of,
)
from restow.broker.core.handoffs.progress import SpanKind, TimeSpan, progress_of, spans_of

seconds = st.floats(1e-4, 1000.0)
moments = st.lists(
    st.tuples(st.floats(0, 400), st.sampled_from([s for s in State if s.ended]), seconds),
    max_size=40,
)


@given(st.lists(seconds, min_size=1, max_size=60), st.sampled_from([0.5, 0.9, 0.99]))
def test_a_quantile_is_true_to_within_a_tenth(lasted: list[float], share: float) -> None:
    counts = QuantileCounts()
    for one in lasted:
        counts.add(slot_of(one))
    rank = max(0, math.ceil(share * len(lasted) - 0.5) - 1)
    true = sorted(lasted)[rank]
    assert 0.9 <= (counts.quantile(share) or 0) / true <= 1.1


def test_nothing_too_long_and_nothing_too_short() -> None:
    counts = QuantileCounts()
    assert counts.quantile(0.5) is None
    for one in (0.0, -1.0, 1e12):
        counts.add(slot_of(one))
    assert (counts.quantile(0.01) or 1) <= 1e-4
    assert (counts.quantile(0.99) or 0) > 1000


@given(moments)
def test_a_series_is_what_a_list_of_all_ends_would_say(
    ends: list[tuple[float, State, float]],
) -> None:
    """Check that sums are those of the kept steps, whatever is forgotten, and whenever."""
    series, now_s, known = TallySeries(10.0), 5000.0, []
    for passed_s, state, lasted_s in ends:
        now_s += passed_s
        count_end([series], state, 100, lasted_s, now_s)
        known.append((now_s, state, lasted_s))
        step = now_s // 10
        kept = [end for end in known if end[0] // 10 > step - series.steps]
        states = Counter(state for _, state, _ in kept)
        transfers = QuantileCounts()
        for _, state, lasted_s in kept:
            if state is State.DONE:
                transfers.add(slot_of(lasted_s))
        whole = series.whole(now_s)
        assert (whole.done, whole.failed, whole.cancelled, whole.bytes_read) == (
            *(states[State.DONE], states[State.FAILED] + states[State.EXPIRED]),
            *(states[State.CANCELLED], 100 * len(kept)),
        )
        for share in (0.5, 0.99):
            assert whole.transfers.quantile(share) == transfers.quantile(share)
        steps = series.latest(now_s)
        assert len(steps) == series.steps
        by_step = [
            sum(at // 10 == step - series.steps + 1 + n for at, _, _ in kept) for n in range(90)
        ]
        assert [one.ended for one in steps] == by_step
    assert len(series._tallies) <= series.steps
    assert series.whole(now_s + KEPT_S).ended == 0
    assert series.whole(now_s + KEPT_S).bytes_per_s in (None, 0.0) or not ends


def test_a_broker_that_has_just_begun_shows_no_time_before() -> None:
    series = TallySeries(10.0)
    assert len(series.latest(1000.0, 1000.0)) == 1
    assert len(series.latest(1025.0, 1000.0)) == 3
    assert len(series.latest(5000.0, 1000.0)) == 90


def test_pairs_are_bounded_and_the_latest_stay() -> None:
    traffic = Traffic()
    for number in range(MAX_PAIRS + 5):
        count_end([traffic.of((f"p{number}", "d"))], State.DONE, number, 1.0, 1000.0)
    pairs = list(traffic.pairs("t", 1000.0))
    assert len(pairs) == MAX_PAIRS
    assert pairs[0].source == f"p{MAX_PAIRS + 4}"
    found, left_out = busiest(pairs, 3)
    assert [one.source for one in found] == [f"p{MAX_PAIRS + n}" for n in (4, 3, 2)]
    assert left_out == MAX_PAIRS - 3
    assert not list(traffic.pairs("t", 1000.0 + KEPT_S + traffic_module.PAIR_STEP_S))


def hand_over(world: World, name: str, source: str = "p", reason: str = "") -> None:
    p, d = (world.sides[key] for key in world.sides if key.engine_id in (source, "d"))
    world.begin(p, d, name)
    handoff = world.find(name)
    world.wait(0.25)
    world.settle(d, handoff.number, reason=reason, size_bytes=1000)


def test_what_is_known_of_a_pair_does_not_depend_on_what_is_remembered() -> None:
    """Check that a rare pair is known after more other ends than the broker remembers at all."""
    world = World(limits=Limits(max_ended=3, tenant_max_ended=2))
    for name in ("p", "p2"):
        world.engine(name)
    world.engine("d")
    hand_over(world, "its own", "p2")
    for number in range(30):
        hand_over(world, f"h{number}", reason="READ_FAILED" if number % 3 == 0 else "")
    ledger = world.directory.ledger
    assert "p2" not in {one.source.key.engine_id for one in ledger.ended.values() if one.source}
    pairs = {one.source: one.tally for one in ledger.tenants.pairs("t", world.now_s)}
    assert (pairs["p2"].done, pairs["p2"].bytes_read) == (1, 1000)
    assert (pairs["p"].done, pairs["p"].failed) == (20, 10)
    assert pairs["p"].bytes_per_s == 4000.0
    assert not list(ledger.tenants.pairs("another", world.now_s))
    whole = ledger.statistics.series.whole(world.now_s)
    assert (whole.done, whole.failed, whole.bytes_read) == (21, 10, 31_000)


def test_spans_tell_waiting_granting_staging_and_reading_by_rank() -> None:
    world, p, d = p_and_d(1, 2, staged=True)
    began_s = world.now_s
    world.request(d)
    handoff = world.find()
    world.wait(1.0)
    assert spans_of(handoff, world.now_s) == [
        TimeSpan(SpanKind.WAIT, began_s, began_s + 1, over=False)
    ]
    assert progress_of(handoff) is None
    world.ready(p)
    world.wait(0.5)
    assert [(one.kind, one.rank, one.over) for one in spans_of(handoff, world.now_s)] == [
        *((SpanKind.WAIT, None, True), (SpanKind.GRANT, None, True)),
        *((SpanKind.STAGE, rank, False) for rank in (0, 1)),
    ]
    world.stage(p, handoff.number, dst_rank=0)
    world.wait(0.5)
    world.stage(p, handoff.number, dst_rank=1)
    world.settle(d, handoff.number, 0, size_bytes=10)
    world.wait(0.5)
    progress = progress_of(handoff)
    assert progress is not None
    assert (progress.settled_ranks, progress.ranks, progress.bytes_read) == (1, 2, 10)
    spans = {(one.kind, one.rank): one for one in spans_of(handoff, world.now_s)}
    granted_s = began_s + 1.0
    stage, read = spans[SpanKind.STAGE, 1], spans[SpanKind.READ, 1]
    assert (stage.begin_s, stage.end_s, stage.over) == (granted_s, granted_s + 1.0, True)
    assert (read.begin_s, read.end_s, read.over) == (granted_s + 1.0, world.now_s, False)
    assert (spans[SpanKind.READ, 0].bytes_read, spans[SpanKind.READ, 0].over) == (10, True)
    world.settle(d, handoff.number, 1, size_bytes=20)
    assert progress_of(handoff) is None
    ended = {(one.kind, one.rank): one for one in spans_of(handoff, world.now_s + 99)}
    assert all(one.over and one.begin_s <= one.end_s <= world.now_s for one in ended.values())
    assert ended[SpanKind.READ, 1].bytes_read == 20


def test_a_rank_that_never_reported_is_told() -> None:
    world, _, d, _ = reading(1, 2)
    handoff = world.find()
    world.wait(0.5)
    world.settle(d, handoff.number, 0, size_bytes=10)
    world.wait(60.0)
    assert handoff.ended
    reads = [one for one in spans_of(handoff, world.now_s) if one.kind is SpanKind.READ]
    assert [(one.rank, one.bytes_read, one.over) for one in reads] == [
        (0, 10, True),
        (1, None, True),
    ]
    assert reads[1].end_s == handoff.ended_s


def test_of_a_grant_that_was_given_back_no_span_is_left() -> None:
    world, p, d, number = reading(2, 2, staged=True)
    world.stage_all(p, number, 2)
    back(world, p, 1)
    for rank in (0, 1):
        world.settle(d, number, rank, "READ_FAILED")
    world.wait(0.25)
    again = world.find()
    assert (again.number != number, again.state) == (True, State.STAGING)
    world.stage_all(p, again.number, 2)
    spans = spans_of(again, world.now_s)
    kinds = Counter(one.kind for one in spans)
    assert kinds == {
        SpanKind.WAIT: 1,
        SpanKind.GRANT: 1,
        SpanKind.STAGE: 4,
        SpanKind.READ: 2,
    }
    assert all(one.begin_s >= again.granted_s for one in spans if one.rank is not None)
    assert not [one for one in spans if one.kind is SpanKind.READ and one.over]
