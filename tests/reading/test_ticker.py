"""How often transports are looked after, on a loop that only takes notes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import cast

import pytest

from agent_harness.waiting import until
from restow.agents.reading.lane import (
    ALERT_FOR_S,
    ALERT_S,
    BUSY_S,
    REST_S,
    SUSPECT_FOR_S,
    WORK_S,
    Ticker,
    pause_s,
)


class Notes:
    """An event loop of which a ticker needs one method; `ring` is its clock."""

    def __init__(self) -> None:
        self.pauses: list[float] = []
        self.waiting: list[Callable[[], None]] = []

    def call_later(self, pause_s: float, callback: Callable[[], None]) -> Notes:
        self.pauses.append(pause_s)
        self.waiting.append(callback)
        return self

    def cancel(self) -> None:
        self.waiting.clear()

    def ring(self) -> None:
        (callback,) = self.waiting
        callback()


class Work:
    """Counts ticks; each takes ``busy_s`` of the processor."""

    def __init__(self, busy_s: float = 0.0, fails: bool = False) -> None:
        self.ticks, self.busy_s, self.fails = 0, busy_s, fails

    def __call__(self) -> None:
        self.ticks += 1
        until_s = time.thread_time() + self.busy_s
        while time.thread_time() < until_s:
            pass
        if self.fails:
            raise RuntimeError("a tick that fails")


def started(work: Work) -> tuple[Ticker, Notes]:
    ticker, notes = Ticker(work), Notes()
    ticker.start(cast(asyncio.AbstractEventLoop, notes))
    return ticker, notes


def test_pauses_grow_with_idleness() -> None:
    pauses = [pause_s(idle) for idle in (0.0, 0.003, 0.012, 1.0, ALERT_FOR_S - 0.1, ALERT_FOR_S)]
    assert pauses == [BUSY_S, BUSY_S, 0.003, ALERT_S, ALERT_S, REST_S]


def test_a_rank_that_nobody_reads_is_looked_after_rarely() -> None:
    work = Work()
    _, notes = started(work)
    notes.ring()
    assert (work.ticks, notes.pauses) == (1, [REST_S, REST_S])


def test_work_that_is_expected_is_looked_after_soon() -> None:
    ticker, notes = started(Work())
    ticker.expect_work()
    assert notes.pauses[-1] <= ALERT_S
    assert len(notes.waiting) == 1, "two ticks are on their way"


def test_a_tick_that_found_work_is_soon_followed_by_another() -> None:
    _, notes = started(Work(busy_s=2 * WORK_S))
    notes.ring()
    assert notes.pauses[-1] <= ALERT_S


class Clock:
    """Stands in for the ticker's `time`: it stands still until it is set."""

    thread_time = staticmethod(time.thread_time)

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.mark.parametrize(
    ("long_ticks", "then_s"),
    [pytest.param(1, REST_S, id="chance"), pytest.param(2, ALERT_S, id="work")],
)
def test_only_long_ticks_in_a_row_are_work(
    long_ticks: int, then_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, work = Clock(), Work(busy_s=2 * WORK_S)
    monkeypatch.setattr("restow.agents.reading.lane.time", clock)
    _, notes = started(work)
    for _ in range(long_ticks):
        notes.ring()
        assert notes.pauses[-1] == BUSY_S
    work.busy_s = 0.0
    clock.now_s += 2 * SUSPECT_FOR_S
    notes.ring()
    assert notes.pauses[-1] == then_s


def test_a_tick_that_fails_is_not_the_last() -> None:
    _, notes = started(Work(fails=True))
    with pytest.raises(RuntimeError, match="a tick that fails"):
        notes.ring()
    assert len(notes.waiting) == 1


def test_a_stopped_ticker_is_silent() -> None:
    ticker, notes = started(Work())
    ticker.stop()
    ticker.stop()
    ticker.expect_work()
    assert not notes.waiting


async def test_it_ticks_on_a_real_loop() -> None:
    work = Work()
    ticker = Ticker(work)
    ticker.start()
    ticker.expect_work()
    await until(lambda: work.ticks >= 3)
    ticker.stop()
