"""Laws of the staging allocator, and the line in front of it."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_harness.waiting import until
from restow.agents.memory.errors import StagingExhaustedError
from restow.agents.memory.staging import ALIGN_BYTES, StagingAllocator, StagingPool, StagingRun

POOL_BYTES = 64 * ALIGN_BYTES


@given(st.lists(st.one_of(st.integers(0, 40 * ALIGN_BYTES), st.just(None)), max_size=60))
def test_runs_in_use_and_free_runs_tile_the_pool(steps: list[int | None]) -> None:
    # A step that is a number allocates that many bytes; None frees the oldest run.
    allocator = StagingAllocator(POOL_BYTES)
    used: list[StagingRun] = []
    for step in steps:
        if step is None:
            if used:
                allocator.free(used.pop(0))
        elif (run := allocator.allocate(step)) is not None:
            assert run.length_bytes >= max(step, 1)
            assert run.offset_bytes % ALIGN_BYTES == 0
            used.append(run)
        taken = sorted(used)
        assert all(a.stop_bytes <= b.offset_bytes for a, b in pairwise(taken))
        assert allocator.free_bytes == POOL_BYTES - sum(run.length_bytes for run in used)
    for run in used:
        allocator.free(run)
    assert allocator.allocate(POOL_BYTES) == StagingRun(0, POOL_BYTES), "the free runs did not join"


async def test_more_than_the_pool_fails_at_once_even_when_others_wait() -> None:
    pool = StagingPool(POOL_BYTES)
    await pool.acquire(POOL_BYTES)
    waiter = asyncio.create_task(pool.acquire(1))
    with pytest.raises(StagingExhaustedError, match="the staging pool has 4096"):
        await pool.acquire(POOL_BYTES + 1)
    waiter.cancel()


async def test_first_come_first_served_though_a_later_one_would_fit() -> None:
    pool = StagingPool(POOL_BYTES)
    small, rest = await pool.acquire(ALIGN_BYTES), await pool.acquire(POOL_BYTES - ALIGN_BYTES)
    order: list[str] = []

    async def wait(name: str, length_bytes: int) -> StagingRun:
        run = await pool.acquire(length_bytes)
        order.append(name)
        return run

    large = asyncio.create_task(wait("large", POOL_BYTES // 2))
    late = asyncio.create_task(wait("late", ALIGN_BYTES))
    await until(lambda: pool.waiting == 2)
    pool.release(small)
    await asyncio.sleep(0)
    assert order == [], "the late one overtook"
    pool.release(rest)
    await asyncio.gather(large, late)
    assert order == ["large", "late"]


async def test_nothing_leaks_when_waiters_are_cancelled_at_any_time() -> None:
    pool = StagingPool(POOL_BYTES)

    async def use(length_bytes: int) -> None:
        run = await pool.acquire(length_bytes)
        try:
            await asyncio.sleep(0)
        finally:
            pool.release(run)

    tasks = [asyncio.create_task(use((i % 40 + 1) * ALIGN_BYTES)) for i in range(200)]
    for i, task in enumerate(tasks):
        if i % 3 == 0:
            task.cancel()
        elif i % 7 == 0:
            await asyncio.sleep(0)
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (pool.waiting, pool.free_bytes) == (0, POOL_BYTES)


async def test_a_waiter_cancelled_in_the_moment_of_its_turn_gives_the_run_back() -> None:
    pool = StagingPool(POOL_BYTES)
    run = await pool.acquire(POOL_BYTES)
    first = asyncio.create_task(pool.acquire(POOL_BYTES))
    second = asyncio.create_task(pool.acquire(POOL_BYTES))
    await until(lambda: pool.waiting == 2)
    pool.release(run)  # the first one's future is set, its task has not run yet
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert (await second).length_bytes == POOL_BYTES


async def test_a_cancelled_head_lets_the_next_one_go() -> None:
    pool = StagingPool(POOL_BYTES)
    await pool.acquire(POOL_BYTES // 2)
    head = asyncio.create_task(pool.acquire(POOL_BYTES))
    small = asyncio.create_task(pool.acquire(ALIGN_BYTES))
    await until(lambda: pool.waiting == 2)
    head.cancel()
    assert (await small).length_bytes == ALIGN_BYTES
