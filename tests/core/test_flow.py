"""Bursts larger than the wire: what is granted at once, who waits, and in which order."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.world import World, ends, reading
from restow.broker.core.audit import audit
from restow.broker.core.common import actions as act
from restow.broker.core.common.keys import EngineKey
from restow.broker.core.engines import flow as flows
from restow.broker.core.engines.flow import (
    FIRST_WINDOW_BYTES,
    LEAST_WINDOW_BYTES,
    SMALL_BYTES,
    Flow,
)
from restow.broker.core.handoffs.late import waits_for

D = EngineKey("t", "d")
MIB = 1 << 20


def test_one_is_always_admitted_and_others_while_there_is_room() -> None:
    flow = Flow()
    assert flow.begin(D, 1, 100 * FIRST_WINDOW_BYTES, 0.0)
    assert not flow.begin(D, 2, 64 * MIB, 0.0)
    assert flow.begin(EngineKey("t", "e"), 3, 64 * MIB, 0.0), "another engine's affair"
    flow.leave(D, 1, 1.0)
    assert flow.next(D) == 2
    assert flow.begin(D, 2, 64 * MIB, 1.0)


def test_large_ones_go_in_order_and_small_ones_beside_them() -> None:
    flow = Flow()
    flow.begin(D, 1, FIRST_WINDOW_BYTES, 0.0)
    assert not flow.begin(D, 2, 64 * MIB, 0.0)
    assert not flow.begin(D, 3, 2 * MIB, 0.0), "it came later"
    small = range(10, 10 + flows.SMALL_WINDOW_BYTES // SMALL_BYTES)
    assert all(flow.begin(D, number, SMALL_BYTES, 0.0) for number in small)
    assert not flow.begin(D, 99, SMALL_BYTES, 0.0), "beside the queue, and no more than that"
    flow.leave(D, 10, 1.0, done=False)
    assert flow.next(D) == 99
    assert flow.begin(D, 99, SMALL_BYTES, 1.0)
    flow.leave(D, 1, 1.0)
    assert [flow.next(D), flow.next(D)] == [2, 3]


def test_the_window_follows_the_measured_rate() -> None:
    flow = Flow()
    for number in range(50):  # 100 MiB/s
        assert flow.begin(D, number, 50 * MIB, float(number))
        flow.leave(D, number, number + 0.5, done=True)
    assert flow.begin(D, 100, 50 * MIB, 100.0)
    assert flow.begin(D, 101, 50 * MIB, 100.0)
    assert not flow.begin(D, 102, 50 * MIB, 100.0)
    flow.leave(D, 100, 101.0, done=False)
    assert flow.next(D) == 102, "what failed tells no rate"


def test_a_slow_way_has_the_least_window() -> None:
    flow = Flow()
    flow.begin(D, 0, MIB, 0.0)
    flow.leave(D, 0, 1000.0, done=True)
    assert flow.begin(D, 1, LEAST_WINDOW_BYTES - MIB, 0.0)
    assert flow.begin(D, 2, MIB + 1, 0.0) is False
    flow.forget(D)
    assert flow.next(D) is None


def most_under_way(per_s: float, size_bytes: int) -> int:
    """Return the most handoffs that are under way after the first thousand, when the rate is known.

    A D is asked for 6,000 handoffs at once; it reads ``per_s`` of them a second, one after another.
    """
    flow, reading, now_s = Flow(), deque[int](), 0.0
    reading.extend(n for n in range(6000) if flow.begin(D, n, size_bytes, now_s))
    most = 0
    for ended in range(6000):
        now_s += 1 / per_s
        flow.leave(D, reading.popleft(), now_s, done=True)
        while (number := flow.next(D)) is not None:
            assert flow.begin(D, number, size_bytes, now_s)
            reading.append(number)
        if ended > 1000:
            most = max(most, len(reading))
    assert not reading
    return most


@pytest.mark.parametrize("size_bytes", [16, 40_000, SMALL_BYTES])
@pytest.mark.parametrize("per_s", [5.0, 300.0, 4000.0])
def test_small_ones_are_read_as_many_at_once_as_take_a_second(
    per_s: float, size_bytes: int
) -> None:
    least = flows.LEAST_SMALL_READS
    assert most_under_way(per_s, size_bytes) <= max(least, 1.1 * per_s * flows.UNDER_WAY_S)


@given(
    st.lists(st.integers(0, 400 * MIB), min_size=1, max_size=40),
    st.lists(st.integers(0, 100), max_size=80),
)
def test_everybody_has_a_turn_and_nothing_is_counted_twice(
    sizes: list[int], picks: list[int]
) -> None:
    flow = Flow()
    reading = [n for n, size in enumerate(sizes) if flow.begin(D, n, size, 0.0)]
    served = set(reading)
    for pick in [*picks, *range(len(sizes))]:
        if not reading:
            break
        flow.leave(D, reading.pop(pick % len(reading)), 1.0, done=True)
        while (number := flow.next(D)) is not None:
            assert number not in served
            if flow.begin(D, number, sizes[number], 1.0):
                served.add(number)
                reading.append(number)
    for number in list(reading):
        flow.leave(D, number, 2.0)
    assert served == set(range(len(sizes)))
    assert not flow.engines()


def burst(world: World, count: int, timeout_s: float = 300.0) -> None:
    p, d = world.engine("p"), world.engine("d")
    d.record.snapshot_bytes = FIRST_WINDOW_BYTES // 2
    for index in range(count):
        world.publish(p, f"h{index}", lease_s=300.0)
        world.fence(p, name=f"h{index}")
        world.request(d, f"h{index}", timeout_s=timeout_s)


def executed(world: World) -> list[str]:
    return [one.handoff_id for one in world.orders(act.SendExecute)]


def test_a_burst_is_read_in_order_and_all_of_it() -> None:
    world = World()
    burst(world, 6)
    d = world.side("d")
    assert executed(world) == ["h0", "h1"]
    assert "reads other states first" in waits_for(world.find("h2"))
    for index in range(6):
        world.now_s += 0.3
        world.settle(d, world.find(f"h{index}").number)
    assert executed(world) == [f"h{index}" for index in range(6)]
    assert ends(d) == [("DONE", "")] * 6


def test_patience_that_runs_out_in_the_queue_says_so() -> None:
    world = World()
    burst(world, 3, timeout_s=2.0)
    world.wait(2.1)
    assert ("EXPIRED", "READS_QUEUED") in ends(world.side("d"))


def test_one_that_gives_up_in_the_queue_leaves_it() -> None:
    world = World()
    burst(world, 4)
    d = world.side("d")
    world.cancel(d, "h2")
    world.settle(d, world.find("h0").number)
    assert executed(world) == ["h0", "h1", "h3"]


def test_an_order_that_had_no_turn_is_given_again() -> None:
    world, p, d, number = reading()
    world.settle(d, number, reason="READ_NOT_BEGUN", size_bytes=0)
    world.wait(0.02)
    again = world.find().number
    assert again != number
    world.settle(d, again)
    assert ends(p) == ends(d) == [("DONE", "")]


def test_those_that_another_end_made_room_for_are_found_by_the_clock() -> None:
    world = World()
    burst(world, 3)
    world.cancel(world.side("p"), "h0")
    world.wait(0.02)
    assert executed(world) == ["h0", "h1", "h2"]


def test_the_audit_compares_reads_that_count_with_grants() -> None:
    world, _, d, number = reading()
    flow, key = world.directory.ledger.flow, d.record.key
    assert not audit(world.directory)
    flow.begin(key, number + 1, 1, world.now_s)
    words = f"among the reads of d, handoff {number + 1} has no grant"
    assert audit(world.directory) == [words]
    flow.leave(key, number + 1, world.now_s)
    assert not flow.begin(key, number + 1, FIRST_WINDOW_BYTES + 1, world.now_s)
    words = f"handoff {number + 1} waits for reads of d, and needs none"
    assert audit(world.directory) == [words]
    flow.leave(key, number + 1, world.now_s)
    flow.leave(key, number, world.now_s)
    words = f"among the reads of d, handoff {number} has a grant and does not count"
    assert audit(world.directory) == [words]
