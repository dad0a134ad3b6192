"""How often transports are looked after."""

from __future__ import annotations

import asyncio
import time

from agent_harness.waiting import until
from restow.agents.ticker import ALERT_FOR_S, ALERT_S, BUSY_S, REST_S, WORK_S, Ticker, pause_s


class Work:
    """Counts ticks; each takes ``busy_s`` of the processor."""

    def __init__(self) -> None:
        self.ticks = 0
        self.busy_s = 0.0
        self.fails = False

    def __call__(self) -> None:
        self.ticks += 1
        until_s = time.thread_time() + self.busy_s
        while time.thread_time() < until_s:
            pass
        if self.fails:
            raise RuntimeError("a tick that fails")


def test_pauses_grow_with_idleness() -> None:
    pauses = [pause_s(idle) for idle in (0.0, 0.003, 0.012, 1.0, ALERT_FOR_S - 0.1, ALERT_FOR_S)]
    assert pauses == [BUSY_S, BUSY_S, 0.003, ALERT_S, ALERT_S, REST_S]


async def ticks_in(work: Work, seconds: float) -> int:
    before = work.ticks
    await asyncio.sleep(seconds)
    return work.ticks - before


async def test_a_rank_that_nobody_reads_is_looked_after_rarely() -> None:
    work = Work()
    ticker = Ticker(work)
    ticker.start()
    assert await ticks_in(work, 0.35) <= 3
    ticker.stop()


async def test_work_that_is_expected_is_looked_after_at_once() -> None:
    work = Work()
    ticker = Ticker(work)
    ticker.start()
    ticker.expect_work()
    async with asyncio.timeout(REST_S * 0.9):
        await until(lambda: work.ticks >= 3)
    ticker.stop()


async def test_a_tick_that_found_work_is_soon_followed_by_another() -> None:
    work = Work()
    work.busy_s = 2 * WORK_S
    ticker = Ticker(work)
    ticker.start()
    await until(lambda: work.ticks >= 1)
    async with asyncio.timeout(2 * REST_S):
        await until(lambda: work.ticks >= 10)
    ticker.stop()


async def test_a_tick_that_fails_is_not_the_last() -> None:
    work = Work()
    work.fails = True
    asyncio.get_running_loop().set_exception_handler(lambda _loop, _context: None)
    ticker = Ticker(work)
    ticker.start()
    await until(lambda: work.ticks >= 2)
    ticker.stop()


async def test_a_stopped_ticker_is_silent() -> None:
    work = Work()
    ticker = Ticker(work)
    ticker.expect_work()
    ticker.start()
    await until(lambda: work.ticks >= 1)
    ticker.stop()
    ticker.stop()
    ticker.expect_work()
    assert await ticks_in(work, 0.05) == 0
